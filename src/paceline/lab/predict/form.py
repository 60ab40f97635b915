"""Formulas for the training time on N ranks, as sums of terms. Pure.

A run over `images` images takes images / (N b) steps of b images on each of N ranks, and

    T = images / (N b) * (b t + c1 [N > 1] + c2 * 2 (n - 1) / n) + F

where t is the time of an image on one rank, c1 the cost per step of having several ranks, c2 that between n nodes, and
F the fixed cost. 2 (n - 1) / n is the share of the gradients that a ring of n nodes moves (Patarasuk and Yuan 2009, doi
10.1016/j.jpdc.2008.09.002). `docs/explanation/prediction.md` derives it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from paceline.lab.predict.points import Point

Growth = Callable[[Point], float]
COMPUTE_PART: Final = "compute"
FIXED_PART: Final = "start_up"


@dataclass(frozen=True)
class Term:
    """A term that is linear in its coefficient, in seconds; `growth` returns the factor of a point.

    `name` is the coefficient, `part` its share of a run, and `told_by` the points that would identify it.
    """

    name: str
    part: str
    growth: Growth
    told_by: str


@dataclass(frozen=True)
class Form:
    """A sum of terms, the first of which is compute; the last ones are dropped first if points do not identify them."""

    name: str
    formula: str
    terms: tuple[Term, ...]


def steps_of(point: Point) -> float:
    """Return the number of steps of `point`, possibly fractional."""
    return point.images / (point.ranks * point.rank_batch)


def columns_of(terms: Sequence[Term], points: Sequence[Point]) -> np.ndarray:
    """Return the factor of each term (columns) at each point (rows), float64."""
    return np.array([[term.growth(point) for term in terms] for point in points], dtype=np.float64)


def _per_step(name: str, part: str, growth: Growth, identified_by: str) -> Term:
    return Term(name, part, lambda point: steps_of(point) * growth(point), identified_by)


def _between_nodes(name: str, growth: Growth) -> Term:
    return _per_step(name, "between_nodes", growth, "points of several nodes")


IMAGE: Final = Term("t_s", COMPUTE_PART, lambda point: point.images / point.ranks, "any")
SEVERAL: Final = _per_step(
    "c1_s", "several_ranks", lambda point: float(point.ranks > 1), "points of one rank and of several"
)
FIXED: Final = Term("f_s", FIXED_PART, lambda point: 1.0, "whole runs on more numbers of ranks")
NODES: Final = _between_nodes("c2_s", lambda point: 2 * (point.nodes - 1) / point.nodes)

TWO_LEVELS: Final = Form(
    "two levels",
    "T = images / (N b) * (b t_s + c1_s [N > 1] + c2_s * 2 (n - 1) / n) + f_s",
    (IMAGE, SEVERAL, NODES, FIXED),
)
"""The formula used for predictions, of n nodes and N ranks."""


def _one_level(name: str, growth: Growth) -> Form:
    term = _per_step("c_s", "several_ranks", growth, "one rank and several")
    return Form(name, "", (IMAGE, term, FIXED))


OTHERS: Final = (
    _one_level("constant", lambda point: float(point.ranks > 1)),
    _one_level("ring", lambda point: 2 * (point.ranks - 1) / point.ranks),
    _one_level("tree", lambda point: math.log2(point.ranks)),
    _one_level("stragglers", lambda point: math.sqrt(2 * math.log(point.ranks))),
    Form(
        "two levels, tree",
        "",
        (IMAGE, SEVERAL, _between_nodes("c2_s", lambda point: math.log2(point.nodes)), FIXED),
    ),
    Form(
        "two levels, stragglers",
        "",
        (IMAGE, SEVERAL, _between_nodes("c2_s", lambda point: math.sqrt(2 * math.log(point.nodes))), FIXED),
    ),
)
"""Alternative formulas; their disagreement widens the prediction interval.

`tree` grows like the latency of a tree (Thakur et al. 2005, doi 10.1177/1094342005051521), `stragglers` like the
expected latest of N ranks with normal steps (sqrt(2 ln N), Gumbel 1958).
"""
