"""How sure a prediction is: bounds between which a run would lie 19 times of 20. Pure, and the same every time.

Three things are not known, and each is drawn many times over: the noise of the points (from what the form leaves over,
and from points that are predicted from the others), the form (all forms, each as likely as it fits), and what no point
tells, such as the cost of a second node where all were measured on one. `docs/explanation/prediction.md` says how the
constants were calibrated, and on what.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from paceline.lab.predict.fit import Fit, fit, solve_near, told_terms
from paceline.lab.predict.form import IMAGE, OTHERS, TWO_LEVELS, columns_of
from paceline.lab.predict.points import Point

NOISE: Final = 0.03
"""Standard deviation of a time about its form, as a share of it, where the points do not show a larger one."""
UNTOLD: Final = 0.08
"""What a step costs more on several ranks, and again on several nodes, as a share of computing it, where no point has
them: the standard deviation of a normal distribution, of which the upper half is drawn."""
_CONFIDENCE: Final = 0.95
_NUM_DRAWS: Final = 500


@dataclass(frozen=True)
class Bounds:
    """Seconds: where a run would lie with 95 % confidence."""

    low_s: float
    high_s: float


def bounds_of(chosen: Fit, points: Sequence[Point], targets: Sequence[Point], *, has_fixed: bool) -> list[Bounds]:
    """Return the bounds of each of `targets`, whose own `time_s` does not count; what `chosen` says lies between."""
    noise = noise_of(chosen, points, has_fixed=has_fixed)
    fits = [fit(form, points, has_fixed=has_fixed) for form in (TWO_LEVELS, *OTHERS)]
    values = np.concatenate([_drawn(fitted, points, targets, noise) for fitted in fits])
    weights = np.repeat(_weights([_information(fitted, points, noise) for fitted in fits]), _NUM_DRAWS)
    found = []
    for at, time_s in enumerate(chosen.times(targets)):
        low_s, high_s = _quantiles(values[:, at], weights)
        found.append(Bounds(min(low_s, float(time_s)), max(high_s, float(time_s))))
    return found


def noise_of(chosen: Fit, points: Sequence[Point], *, has_fixed: bool) -> float:
    """Return the standard deviation of the logarithm of a time: the largest of what can be estimated.

    That is `NOISE`; what `chosen` leaves over, with as many degrees of freedom as there are more points than costs; and
    how far each point lies from what the others say of it, where the others tell all terms too.
    """
    estimates = [NOISE]
    freedom = len(points) - int(np.count_nonzero(chosen.coefficients))  # a cost at its bound of 0 adapts to nothing
    if freedom > 0:
        estimates.append(float(np.sqrt(np.square(_residuals(chosen, points)).sum() / freedom)))
    left_out: list[float] = []
    places = [_place(point, has_fixed=has_fixed) for point in points]
    for place in dict.fromkeys(places):
        others = [point for point, its in zip(points, places, strict=True) if its != place]
        if others and told_terms(chosen.terms, others) == chosen.terms:
            alone = [point for point, its in zip(points, places, strict=True) if its == place]
            left_out += list(_residuals(fit(chosen.form, others, has_fixed=has_fixed), alone))
    if left_out:
        estimates.append(float(np.sqrt(np.square(left_out).mean())))
    return max(estimates)


def _place(point: Point, *, has_fixed: bool) -> Point:
    """Return a point without what was measured: its time, or of a speed its images."""
    return replace(point, time_s=1.0, images=point.images if has_fixed else 1.0)


def _residuals(fitted: Fit, points: Sequence[Point]) -> np.ndarray:
    residuals: np.ndarray = np.log(fitted.times(points)) - np.log([point.time_s for point in points])
    return residuals


def _information(fitted: Fit, points: Sequence[Point], noise: float) -> float:
    """Return Akaike's criterion (1974, doi 10.1109/TAC.1974.1100705): the smaller, the likelier is a form."""
    return float(np.square(_residuals(fitted, points) / noise).sum()) + 2 * len(fitted.terms)


def _weights(criteria: Sequence[float]) -> np.ndarray:
    """Return how likely each form is beside the likeliest (Burnham and Anderson 2002, section 2.9)."""
    weights: np.ndarray = np.exp((min(criteria) - np.array(criteria)) / 2)
    return weights


def _drawn(fitted: Fit, points: Sequence[Point], targets: Sequence[Point], noise: float) -> np.ndarray:
    """Return what a form says of `targets` (columns) when points and targets get other noise (rows), in seconds."""
    random = np.random.default_rng(0)  # the same draws for each form, and for each call
    times = np.array([point.time_s for point in points])
    moved = times * np.exp(noise * random.standard_normal((_NUM_DRAWS, len(times))))
    coefficients = solve_near(columns_of(fitted.terms, points), fitted.times(points), moved)
    hidden = np.abs(UNTOLD * random.standard_normal((_NUM_DRAWS, 2))) @ _untold(fitted, points, targets).T
    scatter = np.exp(noise * random.standard_normal((_NUM_DRAWS, len(targets))))
    drawn: np.ndarray = (coefficients @ columns_of(fitted.terms, targets).T + hidden) * scatter
    return drawn


def _untold(fitted: Fit, points: Sequence[Point], targets: Sequence[Point]) -> np.ndarray:
    """Return what would be added to each of `targets` (rows) by several ranks and by several nodes (columns).

    In seconds, if they cost as much as computing does; nothing where a point has them.
    """
    computing = columns_of([IMAGE], targets)[:, 0] * fitted.coefficients[0]
    is_told = [any(point.ranks > 1 for point in points), any(point.nodes > 1 for point in points)]
    growth = [[float(target.ranks > 1), 2 * (target.nodes - 1) / target.nodes] for target in targets]
    added: np.ndarray = computing[:, None] * np.where(is_told, 0.0, growth)
    return added


def _quantiles(values: np.ndarray, weights: np.ndarray) -> tuple[float, float]:
    """Return the bounds of the middle 95 % of weighted values."""
    order = np.argsort(values)
    shares = np.cumsum(weights[order]) / weights.sum()
    edges = ((1 - _CONFIDENCE) / 2, (1 + _CONFIDENCE) / 2)
    low, high = (values[order][min(int(np.searchsorted(shares, edge)), len(values) - 1)] for edge in edges)
    return float(low), float(high)
