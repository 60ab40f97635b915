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

from paceline.lab.predict.points import ScalingPoint

GrowthFunction = Callable[[ScalingPoint], float]
COMPUTE_PART: Final = "compute"
FIXED_PART: Final = "start_up"


@dataclass(frozen=True)
class Term:
    """A term that is linear in its coefficient, in seconds; `growth` returns the factor of a point.

    `name` is the coefficient, `part` its share of a run, and `identified_by` the points that would identify it.
    """

    name: str
    part: str
    growth: GrowthFunction
    identified_by: str


@dataclass(frozen=True)
class ScalingFormula:
    """A sum of terms, the first of which is compute; the last ones are dropped first if points do not identify them."""

    name: str
    text: str
    terms: tuple[Term, ...]


def count_steps(point: ScalingPoint) -> float:
    """Return the number of steps of `point`, possibly fractional."""
    return point.images / (point.ranks * point.rank_batch)


def build_design_matrix(terms: Sequence[Term], points: Sequence[ScalingPoint]) -> np.ndarray:
    """Return the factor of each term (columns) at each point (rows), float64."""
    return np.array([[term.growth(point) for term in terms] for point in points], dtype=np.float64)


def _build_per_step_term(name: str, part: str, growth: GrowthFunction, identified_by: str) -> Term:
    return Term(name, part, lambda point: count_steps(point) * growth(point), identified_by)


def _build_between_nodes_term(name: str, growth: GrowthFunction) -> Term:
    return _build_per_step_term(name, "between_nodes", growth, "points of several nodes")


IMAGE_TERM: Final = Term("t_s", COMPUTE_PART, lambda point: point.images / point.ranks, "any")
MULTI_RANK_TERM: Final = _build_per_step_term(
    "c1_s", "several_ranks", lambda point: float(point.ranks > 1), "points of one rank and of several"
)
FIXED_TERM: Final = Term("f_s", FIXED_PART, lambda point: 1.0, "whole runs on more numbers of ranks")
MULTI_NODE_TERM: Final = _build_between_nodes_term("c2_s", lambda point: 2 * (point.nodes - 1) / point.nodes)

TWO_LEVELS: Final = ScalingFormula(
    "two levels",
    "T = images / (N b) * (b t_s + c1_s [N > 1] + c2_s * 2 (n - 1) / n) + f_s",
    (IMAGE_TERM, MULTI_RANK_TERM, MULTI_NODE_TERM, FIXED_TERM),
)
"""The formula used for predictions, of n nodes and N ranks."""


def _build_one_level_formula(name: str, growth: GrowthFunction) -> ScalingFormula:
    term = _build_per_step_term("c_s", "several_ranks", growth, "one rank and several")
    return ScalingFormula(name, "", (IMAGE_TERM, term, FIXED_TERM))


ALTERNATIVES: Final = (
    _build_one_level_formula("constant", lambda point: float(point.ranks > 1)),
    _build_one_level_formula("ring", lambda point: 2 * (point.ranks - 1) / point.ranks),
    _build_one_level_formula("tree", lambda point: math.log2(point.ranks)),
    _build_one_level_formula("stragglers", lambda point: math.sqrt(2 * math.log(point.ranks))),
    ScalingFormula(
        "two levels, tree",
        "",
        (
            IMAGE_TERM,
            MULTI_RANK_TERM,
            _build_between_nodes_term("c2_s", lambda point: math.log2(point.nodes)),
            FIXED_TERM,
        ),
    ),
    ScalingFormula(
        "two levels, stragglers",
        "",
        (
            IMAGE_TERM,
            MULTI_RANK_TERM,
            _build_between_nodes_term("c2_s", lambda point: math.sqrt(2 * math.log(point.nodes))),
            FIXED_TERM,
        ),
    ),
)
"""Alternative formulas; their disagreement widens the prediction interval.

`tree` grows like the latency of a tree (Thakur et al. 2005, doi 10.1177/1094342005051521), `stragglers` like the
expected latest of N ranks with normal steps (sqrt(2 ln N), Gumbel 1958).
"""
