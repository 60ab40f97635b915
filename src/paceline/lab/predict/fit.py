"""Fit a form to points: non-negative coefficients, least squares in the logarithm of the time. Pure.

In the logarithm an error of 5 % counts the same in a run of a minute and one of a day. Coefficients are costs, so none
is negative. Each step of Gauss and Newton is a non-negative least-squares problem (Lawson and Hanson 1974).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from paceline.lab.predict.form import FIXED_PART, Form, Term, columns_of
from paceline.lab.predict.points import Point

_TOLD: Final = 1e-6
"""How far a term's column has to stand out of the others' span, as a share of its length, to be told from them."""
_LEAST: Final = 0.01
"""The least share of its fastest point that is computing: tables in which more ranks save nothing would say none."""
_NUM_STEPS: Final = 50
_HALVINGS: Final = 20
_SETTLED: Final = 1e-12


@dataclass(frozen=True)
class Fit:
    """A form with its coefficients, in the order of `terms`; `left_out` are terms that the points do not tell."""

    form: Form
    terms: tuple[Term, ...]
    coefficients: np.ndarray
    left_out: tuple[Term, ...]

    def times(self, points: Sequence[Point]) -> np.ndarray:
        """Return what the form says of each point, in seconds (float64)."""
        times: np.ndarray = columns_of(self.terms, points) @ self.coefficients
        return times

    def parts(self, point: Point) -> dict[str, float]:
        """Return what a run is made of, in seconds by the name of the part."""
        factors = columns_of(self.terms, [point])[0]
        return {term.part: float(each) for term, each in zip(self.terms, factors * self.coefficients, strict=True)}


def fit(form: Form, points: Sequence[Point], *, has_fixed: bool = True) -> Fit:
    """Fit `form` to at least one point; `has_fixed` is whether times are of whole runs, start-up and all."""
    candidates = [term for term in form.terms if has_fixed or term.part != FIXED_PART]
    terms = told_terms(candidates, points)
    columns = columns_of(terms, points)
    times = np.array([point.time_s for point in points])
    left_out = tuple(term for term in form.terms if term not in terms)
    return Fit(form, terms, solve(columns, times), left_out)


def told_terms(terms: Sequence[Term], points: Sequence[Point]) -> tuple[Term, ...]:
    """Return the terms that `points` tell from the ones before them, in order; the first is always among them."""
    times = np.array([point.time_s for point in points])
    told: list[Term] = []
    basis: list[np.ndarray] = []
    for term in terms:
        column = columns_of([term], points)[:, 0] / times
        rest = column.copy()
        for direction in basis * 2:  # twice, for rounding
            rest -= (direction @ rest) * direction
        length = float(np.linalg.norm(rest))
        if length > _TOLD * float(np.linalg.norm(column)) or not told:
            told.append(term)
            basis.append(rest / length)
    return tuple(told)


def solve(columns: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Return the coefficients >= 0 for which `columns @ coefficients` comes closest to `times` in the logarithm.

    `columns` are points x terms and not negative, the first one, of computing, is positive and so is its coefficient;
    all float64.
    """
    scale = (columns / times[:, None]).max(axis=0)
    relative = columns / times[:, None] / scale
    least = _least(relative, np.ones(len(times)))
    found = _bounded(relative, np.ones(len(times)), least)
    for _ in range(_NUM_STEPS):
        fitted = relative @ found
        slopes = relative / fitted[:, None]
        nearer = _nearer(relative, found, _bounded(slopes, slopes @ found - np.log(fitted), least))
        if nearer is None:
            break
        found = nearer
    coefficients: np.ndarray = found / scale
    return coefficients


def solve_near(columns: np.ndarray, fitted: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Return the coefficients as `solve` does, to first order in how far `times` (draws x points) are from `fitted`.

    `fitted` is what coefficients that were solved for say of the points. The result is draws x terms.
    """
    slopes = columns / fitted[:, None]
    scale = slopes.max(axis=0)
    relative = slopes / scale
    aims = times / fitted
    return np.array([_bounded(relative, aim, _least(relative, aim)) / scale for aim in aims])


def _least(columns: np.ndarray, aims: np.ndarray) -> np.ndarray:
    """Return the lower bounds of coefficients: 0, and a little for computing, which no run goes without."""
    least = np.zeros(columns.shape[1])
    least[0] = _LEAST * (aims / columns[:, 0]).min()
    return least


def _bounded(columns: np.ndarray, aims: np.ndarray, least: np.ndarray) -> np.ndarray:
    from scipy.optimize import nnls  # type: ignore[import-untyped]  # loading it takes a fifth of a second

    bounded: np.ndarray = least + nnls(columns, aims - columns @ least)[0]
    return bounded


def _nearer(relative: np.ndarray, found: np.ndarray, aim: np.ndarray) -> np.ndarray | None:
    """Return the first point on the way back from `aim` that is better than `found`, None when that has settled."""
    error = _error(relative, found)
    for halving in range(_HALVINGS):
        tried: np.ndarray = found + (aim - found) / 2**halving
        if _error(relative, tried) < error - _SETTLED:
            return tried
    return None


def _error(relative: np.ndarray, coefficients: np.ndarray) -> float:
    fitted = relative @ coefficients
    return float(np.square(np.log(fitted)).sum()) if (fitted > 0).all() else np.inf
