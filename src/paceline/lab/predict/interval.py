"""Prediction intervals of 95 %, from a deterministic simulation. Pure.

Three unknowns are drawn many times: the noise of points (from residuals and cross-validation), the formula (weighted by
likelihood), and costs that no point identifies, such as that of a second node. `docs/explanation/prediction.md` has the
calibration of the constants.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from paceline.lab.predict.fit import FormulaFit, fit_formula, select_identifiable_terms, solve_linearized
from paceline.lab.predict.form import ALTERNATIVES, IMAGE_TERM, TWO_LEVELS, build_design_matrix
from paceline.lab.predict.points import ScalingPoint

MIN_NOISE: Final = 0.03
"""Relative standard deviation of a time about its formula, unless the points show a larger one."""
UNMEASURED_COST: Final = 0.08
"""Standard deviation of the cost per step of several ranks, and of several nodes, if no point has them.

As a share of compute; the upper half of a normal distribution is drawn.
"""
_CONFIDENCE: Final = 0.95
_NUM_DRAWS: Final = 500


@dataclass(frozen=True)
class PredictionBounds:
    """Bounds of a run's seconds, with 95 % confidence."""

    low_s: float
    high_s: float


def compute_bounds(
    chosen: FormulaFit, points: Sequence[ScalingPoint], targets: Sequence[ScalingPoint], *, has_fixed: bool
) -> list[PredictionBounds]:
    """Return the bounds of each of `targets`, whose `time_s` is ignored; they include the prediction of `chosen`."""
    noise = estimate_noise(chosen, points, has_fixed=has_fixed)
    fits = [fit_formula(form, points, has_fixed=has_fixed) for form in (TWO_LEVELS, *ALTERNATIVES)]
    values = np.concatenate([_draw_predictions(fitted, points, targets, noise) for fitted in fits])
    weights = np.repeat(_compute_akaike_weights([_compute_aic(fitted, points, noise) for fitted in fits]), _NUM_DRAWS)
    bounds = []
    for index, time_s in enumerate(chosen.predict_times(targets)):
        low_s, high_s = _compute_weighted_interval(values[:, index], weights)
        bounds.append(PredictionBounds(min(low_s, float(time_s)), max(high_s, float(time_s))))
    return bounds


def estimate_noise(chosen: FormulaFit, points: Sequence[ScalingPoint], *, has_fixed: bool) -> float:
    """Return the standard deviation of the logarithm of a time: the largest of several estimates.

    These are `MIN_NOISE`, the residuals of `chosen`, and the errors of leave-one-out predictions where the other points
    identify all terms.
    """
    estimates = [MIN_NOISE]
    freedom = len(points) - int(
        np.count_nonzero(chosen.coefficients)
    )  # a coefficient at its bound of 0 uses no degree of freedom
    if freedom > 0:
        estimates.append(float(np.sqrt(np.square(_compute_log_residuals(chosen, points)).sum() / freedom)))
    left_out: list[float] = []
    settings = [_without_measurement(point, has_fixed=has_fixed) for point in points]
    for setting in dict.fromkeys(settings):
        others = [point for point, own_setting in zip(points, settings, strict=True) if own_setting != setting]
        if others and select_identifiable_terms(chosen.terms, others) == chosen.terms:
            alone = [point for point, own_setting in zip(points, settings, strict=True) if own_setting == setting]
            left_out += list(_compute_log_residuals(fit_formula(chosen.formula, others, has_fixed=has_fixed), alone))
    if left_out:
        estimates.append(float(np.sqrt(np.square(left_out).mean())))
    return max(estimates)


def _without_measurement(point: ScalingPoint, *, has_fixed: bool) -> ScalingPoint:
    """Return a point without its measurement: its time, or the images of a speed."""
    return replace(point, time_s=1.0, images=point.images if has_fixed else 1.0)


def _compute_log_residuals(fitted: FormulaFit, points: Sequence[ScalingPoint]) -> np.ndarray:
    residuals: np.ndarray = np.log(fitted.predict_times(points)) - np.log([point.time_s for point in points])
    return residuals


def _compute_aic(fitted: FormulaFit, points: Sequence[ScalingPoint], noise: float) -> float:
    """Return Akaike's information criterion (1974, doi 10.1109/TAC.1974.1100705); smaller is better."""
    return float(np.square(_compute_log_residuals(fitted, points) / noise).sum()) + 2 * len(fitted.terms)


def _compute_akaike_weights(criteria: Sequence[float]) -> np.ndarray:
    """Return the likelihood of each formula relative to the best (Burnham and Anderson 2002, section 2.9)."""
    weights: np.ndarray = np.exp((min(criteria) - np.array(criteria)) / 2)
    return weights


def _draw_predictions(
    fitted: FormulaFit, points: Sequence[ScalingPoint], targets: Sequence[ScalingPoint], noise: float
) -> np.ndarray:
    """Return drawn predictions of `targets` (columns) under noise of points and targets (rows), in seconds."""
    random = np.random.default_rng(0)  # the same draws for each form, and for each call
    times = np.array([point.time_s for point in points])
    perturbed = times * np.exp(noise * random.standard_normal((_NUM_DRAWS, len(times))))
    coefficients = solve_linearized(build_design_matrix(fitted.terms, points), fitted.predict_times(points), perturbed)
    unidentified = (
        np.abs(UNMEASURED_COST * random.standard_normal((_NUM_DRAWS, 2)))
        @ _compute_unmeasured_costs(fitted, points, targets).T
    )
    scatter = np.exp(noise * random.standard_normal((_NUM_DRAWS, len(targets))))
    drawn: np.ndarray = (coefficients @ build_design_matrix(fitted.terms, targets).T + unidentified) * scatter
    return drawn


def _compute_unmeasured_costs(
    fitted: FormulaFit, points: Sequence[ScalingPoint], targets: Sequence[ScalingPoint]
) -> np.ndarray:
    """Return the unidentified cost of several ranks and of several nodes (columns) per target (rows), in seconds.

    As much as compute for each that no point has, else 0.
    """
    computing = build_design_matrix([IMAGE_TERM], targets)[:, 0] * fitted.coefficients[0]
    is_identified = [any(point.ranks > 1 for point in points), any(point.nodes > 1 for point in points)]
    growth = [[float(target.ranks > 1), 2 * (target.nodes - 1) / target.nodes] for target in targets]
    added: np.ndarray = computing[:, None] * np.where(is_identified, 0.0, growth)
    return added


def _compute_weighted_interval(values: np.ndarray, weights: np.ndarray) -> tuple[float, float]:
    """Return the bounds of the middle 95 % of weighted values."""
    order = np.argsort(values)
    shares = np.cumsum(weights[order]) / weights.sum()
    edges = ((1 - _CONFIDENCE) / 2, (1 + _CONFIDENCE) / 2)
    low, high = (values[order][min(int(np.searchsorted(shares, edge)), len(values) - 1)] for edge in edges)
    return float(low), float(high)
