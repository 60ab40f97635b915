"""Prediction intervals of 95 %, from a deterministic simulation. Pure.

Three unknowns are drawn many times: the noise of points (from residuals and cross-validation), the formula (weighted by
likelihood), and costs that no point identifies, such as that of a second node. `docs/explanation/prediction.md` has the
calibration of the constants.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from paceline.lab.predict.fit import Fit, fit, solve_near, told_terms
from paceline.lab.predict.form import IMAGE, OTHERS, TWO_LEVELS, columns_of
from paceline.lab.predict.points import Point

NOISE: Final = 0.03
"""Relative standard deviation of a time about its formula, unless the points show a larger one."""
UNTOLD: Final = 0.08
"""Standard deviation of the cost per step of several ranks, and of several nodes, if no point has them.

As a share of compute; the upper half of a normal distribution is drawn.
"""
_CONFIDENCE: Final = 0.95
_NUM_DRAWS: Final = 500


@dataclass(frozen=True)
class Bounds:
    """Bounds of a run's seconds, with 95 % confidence."""

    low_s: float
    high_s: float


def bounds_of(chosen: Fit, points: Sequence[Point], targets: Sequence[Point], *, has_fixed: bool) -> list[Bounds]:
    """Return the bounds of each of `targets`, whose `time_s` is ignored; they include the prediction of `chosen`."""
    noise = noise_of(chosen, points, has_fixed=has_fixed)
    fits = [fit(form, points, has_fixed=has_fixed) for form in (TWO_LEVELS, *OTHERS)]
    values = np.concatenate([_drawn(fitted, points, targets, noise) for fitted in fits])
    weights = np.repeat(_weights([_information(fitted, points, noise) for fitted in fits]), _NUM_DRAWS)
    bounds = []
    for index, time_s in enumerate(chosen.times(targets)):
        low_s, high_s = _quantiles(values[:, index], weights)
        bounds.append(Bounds(min(low_s, float(time_s)), max(high_s, float(time_s))))
    return bounds


def noise_of(chosen: Fit, points: Sequence[Point], *, has_fixed: bool) -> float:
    """Return the standard deviation of the logarithm of a time: the largest of several estimates.

    These are `NOISE`, the residuals of `chosen`, and the errors of leave-one-out predictions where the other points
    identify all terms.
    """
    estimates = [NOISE]
    freedom = len(points) - int(
        np.count_nonzero(chosen.coefficients)
    )  # a coefficient at its bound of 0 uses no degree of freedom
    if freedom > 0:
        estimates.append(float(np.sqrt(np.square(_residuals(chosen, points)).sum() / freedom)))
    left_out: list[float] = []
    settings = [_place(point, has_fixed=has_fixed) for point in points]
    for setting in dict.fromkeys(settings):
        others = [point for point, own_setting in zip(points, settings, strict=True) if own_setting != setting]
        if others and told_terms(chosen.terms, others) == chosen.terms:
            alone = [point for point, own_setting in zip(points, settings, strict=True) if own_setting == setting]
            left_out += list(_residuals(fit(chosen.form, others, has_fixed=has_fixed), alone))
    if left_out:
        estimates.append(float(np.sqrt(np.square(left_out).mean())))
    return max(estimates)


def _place(point: Point, *, has_fixed: bool) -> Point:
    """Return a point without its measurement: its time, or the images of a speed."""
    return replace(point, time_s=1.0, images=point.images if has_fixed else 1.0)


def _residuals(fitted: Fit, points: Sequence[Point]) -> np.ndarray:
    residuals: np.ndarray = np.log(fitted.times(points)) - np.log([point.time_s for point in points])
    return residuals


def _information(fitted: Fit, points: Sequence[Point], noise: float) -> float:
    """Return Akaike's information criterion (1974, doi 10.1109/TAC.1974.1100705); smaller is better."""
    return float(np.square(_residuals(fitted, points) / noise).sum()) + 2 * len(fitted.terms)


def _weights(criteria: Sequence[float]) -> np.ndarray:
    """Return the likelihood of each formula relative to the best (Burnham and Anderson 2002, section 2.9)."""
    weights: np.ndarray = np.exp((min(criteria) - np.array(criteria)) / 2)
    return weights


def _drawn(fitted: Fit, points: Sequence[Point], targets: Sequence[Point], noise: float) -> np.ndarray:
    """Return drawn predictions of `targets` (columns) under noise of points and targets (rows), in seconds."""
    random = np.random.default_rng(0)  # the same draws for each form, and for each call
    times = np.array([point.time_s for point in points])
    perturbed = times * np.exp(noise * random.standard_normal((_NUM_DRAWS, len(times))))
    coefficients = solve_near(columns_of(fitted.terms, points), fitted.times(points), perturbed)
    unidentified = np.abs(UNTOLD * random.standard_normal((_NUM_DRAWS, 2))) @ _untold(fitted, points, targets).T
    scatter = np.exp(noise * random.standard_normal((_NUM_DRAWS, len(targets))))
    drawn: np.ndarray = (coefficients @ columns_of(fitted.terms, targets).T + unidentified) * scatter
    return drawn


def _untold(fitted: Fit, points: Sequence[Point], targets: Sequence[Point]) -> np.ndarray:
    """Return the unidentified cost of several ranks and of several nodes (columns) per target (rows), in seconds.

    As much as compute for each that no point has, else 0.
    """
    computing = columns_of([IMAGE], targets)[:, 0] * fitted.coefficients[0]
    is_identified = [any(point.ranks > 1 for point in points), any(point.nodes > 1 for point in points)]
    growth = [[float(target.ranks > 1), 2 * (target.nodes - 1) / target.nodes] for target in targets]
    added: np.ndarray = computing[:, None] * np.where(is_identified, 0.0, growth)
    return added


def _quantiles(values: np.ndarray, weights: np.ndarray) -> tuple[float, float]:
    """Return the bounds of the middle 95 % of weighted values."""
    order = np.argsort(values)
    shares = np.cumsum(weights[order]) / weights.sum()
    edges = ((1 - _CONFIDENCE) / 2, (1 + _CONFIDENCE) / 2)
    low, high = (values[order][min(int(np.searchsorted(shares, edge)), len(values) - 1)] for edge in edges)
    return float(low), float(high)
