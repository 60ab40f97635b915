"""Fit a formula to points: non-negative least squares in the logarithm of the time. Pure.

In the logarithm an error of 5 % weighs the same for a minute and for a day. Each Gauss-Newton step is a non-negative
least-squares problem (Lawson and Hanson 1974).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from paceline.lab.predict.form import FIXED_PART, ScalingFormula, Term, build_design_matrix
from paceline.lab.predict.points import ScalingPoint

_INDEPENDENCE_TOLERANCE: Final = 1e-6
"""A column identifies its term if this share of its length lies outside the others' span."""
_MIN_COMPUTE_SHARE: Final = 0.01
"""Smallest share of compute in the fastest point; otherwise tables without any scaling would fit 0."""
_MAX_STEPS: Final = 50
_MAX_HALVINGS: Final = 20
_CONVERGENCE_TOLERANCE: Final = 1e-12


@dataclass(frozen=True)
class FormulaFit:
    """A formula with its coefficients, in the order of `terms`; the points do not identify the terms `left_out`."""

    formula: ScalingFormula
    terms: tuple[Term, ...]
    coefficients: np.ndarray
    left_out: tuple[Term, ...]

    def predict_times(self, points: Sequence[ScalingPoint]) -> np.ndarray:
        """Return the predicted seconds of each point (float64)."""
        times: np.ndarray = build_design_matrix(self.terms, points) @ self.coefficients
        return times

    def predict_parts(self, point: ScalingPoint) -> dict[str, float]:
        """Return the predicted seconds of a run by part."""
        factors = build_design_matrix(self.terms, [point])[0]
        return {term.part: float(each) for term, each in zip(self.terms, factors * self.coefficients, strict=True)}


def fit_formula(form: ScalingFormula, points: Sequence[ScalingPoint], *, has_fixed: bool = True) -> FormulaFit:
    """Fit `formula` to at least one point; `has_fixed` if times are of whole runs, including start-up."""
    candidates = [term for term in form.terms if has_fixed or term.part != FIXED_PART]
    terms = select_identifiable_terms(candidates, points)
    columns = build_design_matrix(terms, points)
    times = np.array([point.time_s for point in points])
    left_out = tuple(term for term in form.terms if term not in terms)
    return FormulaFit(form, terms, solve_coefficients(columns, times), left_out)


def select_identifiable_terms(terms: Sequence[Term], points: Sequence[ScalingPoint]) -> tuple[Term, ...]:
    """Return the terms that `points` identify given the ones before them; the first is always included."""
    times = np.array([point.time_s for point in points])
    identified: list[Term] = []
    basis: list[np.ndarray] = []
    for term in terms:
        column = build_design_matrix([term], points)[:, 0] / times
        rest = column.copy()
        for direction in basis * 2:  # twice, for rounding
            rest -= (direction @ rest) * direction
        length = float(np.linalg.norm(rest))
        if length > _INDEPENDENCE_TOLERANCE * float(np.linalg.norm(column)) or not identified:
            identified.append(term)
            basis.append(rest / length)
    return tuple(identified)


def solve_coefficients(columns: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Return the coefficients >= 0 for which `columns @ coefficients` is closest to `predict_times` in the logarithm.

    `columns` are points x terms, float64, non-negative; the first one, of compute, is positive, and so is its
    coefficient.
    """
    scale = (columns / times[:, None]).max(axis=0)
    relative = columns / times[:, None] / scale
    least = _compute_lower_bounds(relative, np.ones(len(times)))
    solution = _solve_bounded(relative, np.ones(len(times)), least)
    for _ in range(_MAX_STEPS):
        fitted = relative @ solution
        slopes = relative / fitted[:, None]
        improved = _backtrack(relative, solution, _solve_bounded(slopes, slopes @ solution - np.log(fitted), least))
        if improved is None:
            break
        solution = improved
    coefficients: np.ndarray = solution / scale
    return coefficients


def solve_linearized(columns: np.ndarray, fitted: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Return coefficients as `solve_coefficients` does, to first order in the distance of `predict_times` (draws x points) from `fitted`.

    `fitted` are the predictions of solved coefficients. Returns draws x terms.
    """
    slopes = columns / fitted[:, None]
    scale = slopes.max(axis=0)
    relative = slopes / scale
    aims = times / fitted
    return np.array([_solve_bounded(relative, aim, _compute_lower_bounds(relative, aim)) / scale for aim in aims])


def _compute_lower_bounds(columns: np.ndarray, aims: np.ndarray) -> np.ndarray:
    """Return the lower bounds of coefficients: 0, and a small positive one for compute."""
    least = np.zeros(columns.shape[1])
    least[0] = _MIN_COMPUTE_SHARE * (aims / columns[:, 0]).min()
    return least


def _solve_bounded(columns: np.ndarray, aims: np.ndarray, least: np.ndarray) -> np.ndarray:
    from scipy.optimize import nnls  # type: ignore[import-untyped]  # loading it takes a fifth of a second

    bounded: np.ndarray = least + nnls(columns, aims - columns @ least)[0]
    return bounded


def _backtrack(relative: np.ndarray, current: np.ndarray, target: np.ndarray) -> np.ndarray | None:
    """Return the first point between `aim` and `found` that improves on `found`, None if converged."""
    error = _compute_squared_error(relative, current)
    for halving in range(_MAX_HALVINGS):
        candidate: np.ndarray = current + (target - current) / 2**halving
        if _compute_squared_error(relative, candidate) < error - _CONVERGENCE_TOLERANCE:
            return candidate
    return None


def _compute_squared_error(relative: np.ndarray, coefficients: np.ndarray) -> float:
    fitted = relative @ coefficients
    return float(np.square(np.log(fitted)).sum()) if (fitted > 0).all() else np.inf
