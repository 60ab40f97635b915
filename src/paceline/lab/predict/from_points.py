"""Predict training time from a table of measured points: fit scaling formulas, with 95 % prediction intervals."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from paceline.core.experiments.results import MeasuredPoint, PredictionResult, are_speeds
from paceline.core.units import count, share
from paceline.lab.predict.points import COMPUTE_PART, FIXED_PART, PredictionRequest, ScalingPoint, build_predicted

_INDEPENDENCE_TOLERANCE: Final = 1e-6
"""A column identifies its term if this share of its length lies outside the others' span."""
_MIN_COMPUTE_SHARE: Final = 0.01
"""Smallest share of compute in the fastest point; otherwise tables without any scaling would fit 0."""
_FIT_TOLERANCE: Final = 1e-14
MIN_NOISE: Final = 0.03
"""Relative standard deviation of a time about its formula, unless the points show a larger one."""
UNMEASURED_COST: Final = 0.08
"""Standard deviation of the cost per step of several ranks, and of several nodes, if no point has them.

As a share of compute; the upper half of a normal distribution is drawn.
"""
_CONFIDENCE: Final = 0.95
_NUM_DRAWS: Final = 500
_MAX_EXTRAPOLATION: Final = 8
"""Multiple of the largest measured number of ranks beyond which a note warns."""


@dataclass(frozen=True)
class Term:
    """A term that is linear in its coefficient, in seconds; `growth` returns the factor of a point.

    `name` is the coefficient, `part` its share of a run, and `identified_by` the points that would identify it.
    """

    name: str
    part: str
    growth: Callable[[ScalingPoint], float]
    identified_by: str


@dataclass(frozen=True)
class ScalingFormula:
    """A sum of terms, the first of which is compute; the last ones are dropped first if points do not identify them."""

    name: str
    terms: tuple[Term, ...]


def _count_steps(point: ScalingPoint) -> float:
    return point.images / (point.ranks * point.rank_batch)


def _is_several(number: int) -> float:
    return float(number > 1)


def _grow_as_ring(number: int) -> float:
    """Return the share of the gradients that each of a ring moves (Patarasuk and Yuan 2009, doi
    10.1016/j.jpdc.2008.09.002).
    """
    return 2 * (number - 1) / number


def _grow_as_stragglers(number: int) -> float:
    """Return the expected latest of normally scattering steps (Gumbel 1958)."""
    return math.sqrt(2 * math.log(number))


IMAGE_TERM: Final = Term("t_s", COMPUTE_PART, lambda point: point.images / point.ranks, "any")
MULTI_RANK_TERM: Final = Term(
    "c1_s",
    "several_ranks",
    lambda point: _count_steps(point) * _is_several(point.ranks),
    "points of one rank and of several",
)
FIXED_TERM: Final = Term("f_s", FIXED_PART, lambda point: 1.0, "whole runs on more numbers of ranks")


def _build_one_level(name: str, growth: Callable[[int], float]) -> ScalingFormula:
    term = Term("c_s", "several_ranks", lambda point: _count_steps(point) * growth(point.ranks), "one rank and several")
    return ScalingFormula(name, (IMAGE_TERM, term, FIXED_TERM))


def _build_two_levels(name: str, growth: Callable[[int], float]) -> ScalingFormula:
    term = Term(
        "c2_s", "between_nodes", lambda point: _count_steps(point) * growth(point.nodes), "points of several nodes"
    )
    return ScalingFormula(name, (IMAGE_TERM, MULTI_RANK_TERM, term, FIXED_TERM))


TWO_LEVELS: Final = _build_two_levels("two levels", _grow_as_ring)
"""The formula used for predictions, of n nodes and N ranks; `docs/explanation/prediction.md` derives it.

t_s is the time of an image on one rank, c1_s the cost per step of several ranks, c2_s that between nodes, and f_s the
fixed cost.
"""
_TWO_LEVELS_TEXT: Final = "T = images / (N b) * (b t_s + c1_s [N > 1] + c2_s * 2 (n - 1) / n) + f_s"
ALTERNATIVES: Final = (
    _build_one_level("constant", _is_several),
    _build_one_level("ring", _grow_as_ring),
    _build_one_level("tree", math.log2),
    _build_one_level("stragglers", _grow_as_stragglers),
    _build_two_levels("two levels, tree", math.log2),
    _build_two_levels("two levels, stragglers", _grow_as_stragglers),
)
"""Alternative formulas; their disagreement widens the prediction interval.

`tree` grows like the latency of a tree (Thakur et al. 2005, doi 10.1177/1094342005051521).
"""


def _build_design_matrix(terms: Sequence[Term], points: Sequence[ScalingPoint]) -> np.ndarray:
    """Return the factor of each term (columns) at each point (rows), float64."""
    return np.array([[term.growth(point) for term in terms] for point in points], dtype=np.float64)


def _get_times(points: Sequence[ScalingPoint]) -> np.ndarray:
    return np.array([point.time_s for point in points])


@dataclass(frozen=True)
class FormulaFit:
    """A formula with its coefficients, in the order of `terms`; the points do not identify the terms `left_out`.

    `has_fixed` if times are of whole runs, including start-up.
    """

    formula: ScalingFormula
    terms: tuple[Term, ...]
    coefficients: np.ndarray
    has_fixed: bool

    @property
    def left_out(self) -> tuple[Term, ...]:
        """Terms of the formula that the points do not identify."""
        return tuple(term for term in self.formula.terms if term not in self.terms)

    def predict_times(self, points: Sequence[ScalingPoint]) -> np.ndarray:
        """Return the predicted seconds of each point (float64)."""
        times: np.ndarray = _build_design_matrix(self.terms, points) @ self.coefficients
        return times

    def predict_parts(self, point: ScalingPoint) -> dict[str, float]:
        """Return the predicted seconds of a run by part."""
        factors = _build_design_matrix(self.terms, [point])[0]
        return {term.part: float(each) for term, each in zip(self.terms, factors * self.coefficients, strict=True)}

    def compute_log_residuals(self, points: Sequence[ScalingPoint]) -> np.ndarray:
        """Return the logarithm of predicted over measured seconds of each point."""
        residuals: np.ndarray = np.log(self.predict_times(points)) - np.log(_get_times(points))
        return residuals


def fit_formula(form: ScalingFormula, points: Sequence[ScalingPoint], *, has_fixed: bool = True) -> FormulaFit:
    """Fit `form` to at least one point; `has_fixed` if times are of whole runs, including start-up."""
    terms = _select_identifiable_terms([term for term in form.terms if has_fixed or term.part != FIXED_PART], points)
    coefficients = solve_coefficients(_build_design_matrix(terms, points), _get_times(points))
    return FormulaFit(form, terms, coefficients, has_fixed)


def _select_identifiable_terms(terms: Sequence[Term], points: Sequence[ScalingPoint]) -> tuple[Term, ...]:
    """Return the terms that `points` identify given the previous ones; the first is always included."""
    columns = _build_design_matrix(terms, points) / _get_times(points)[:, None]
    columns /= np.maximum(np.linalg.norm(columns, axis=0), np.finfo(np.float64).tiny)
    identified = [0]
    for index in range(1, len(terms)):
        known, column = columns[:, identified], columns[:, index]
        rest = column - known @ np.linalg.lstsq(known, column, rcond=None)[0]
        if float(np.linalg.norm(rest)) > _INDEPENDENCE_TOLERANCE:
            identified.append(index)
    return tuple(terms[index] for index in identified)


def solve_coefficients(columns: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Return the coefficients >= 0 for which `columns @ coefficients` is closest to `times` in the logarithm.

    `columns` are points x terms, float64, non-negative; the first, of compute, is positive, as is its coefficient.
    """
    from scipy.optimize import least_squares  # type: ignore[import-untyped]  # loading it takes a fifth of a second

    # In the logarithm an error of 5 % weighs the same for a minute and for a day.
    scale = (columns / times[:, None]).max(axis=0)
    relative, ones = columns / times[:, None] / scale, np.ones(len(times))
    least = _compute_lower_bounds(relative, ones)
    solution: np.ndarray = least_squares(
        lambda coefficients: np.log(relative @ coefficients),
        _solve_bounded(relative, ones, least),
        jac=lambda coefficients: relative / (relative @ coefficients)[:, None],
        bounds=(least, np.inf),
        method="dogbox",  # unlike `trf`, it ends exactly at bounds
        ftol=_FIT_TOLERANCE,
        xtol=_FIT_TOLERANCE,
        gtol=_FIT_TOLERANCE,
    ).x
    coefficients: np.ndarray = solution / scale
    return coefficients


def _solve_linearized(columns: np.ndarray, fitted: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Return the coefficients (draws x terms) of `times` (draws x points), to first order around `fitted`."""
    slopes = columns / fitted[:, None]
    scale = slopes.max(axis=0)
    relative = slopes / scale
    targets = times / fitted
    return np.array([_solve_bounded(relative, each, _compute_lower_bounds(relative, each)) / scale for each in targets])


def _compute_lower_bounds(columns: np.ndarray, targets: np.ndarray) -> np.ndarray:
    # Without a positive bound for compute, points without any scaling would be fitted by fixed costs alone.
    least = np.zeros(columns.shape[1])
    least[0] = _MIN_COMPUTE_SHARE * (targets / columns[:, 0]).min()
    return least


def _solve_bounded(columns: np.ndarray, targets: np.ndarray, least: np.ndarray) -> np.ndarray:
    from scipy.optimize import nnls

    bounded: np.ndarray = least + nnls(columns, targets - columns @ least)[0]
    return bounded


def compute_bounds(
    chosen: FormulaFit, points: Sequence[ScalingPoint], targets: Sequence[ScalingPoint]
) -> list[tuple[float, float]]:
    """Return the 95 % bounds of the seconds of each of `targets`, whose `time_s` is ignored.

    They include the prediction of `chosen`.
    """
    # Three unknowns are drawn many times: the noise of points, the formula (weighted by likelihood), and costs that no
    # point identifies. `docs/explanation/prediction.md` has the calibration of the constants.
    noise = estimate_noise(chosen, points)
    fits = [fit_formula(form, points, has_fixed=chosen.has_fixed) for form in (TWO_LEVELS, *ALTERNATIVES)]
    values = np.concatenate([_draw_predictions(fitted, points, targets, noise) for fitted in fits])
    # Akaike's information criterion (1974, doi 10.1109/TAC.1974.1100705), and the likelihood of each formula relative
    # to the best (Burnham and Anderson 2002, section 2.9).
    criteria = np.array(
        [np.square(fitted.compute_log_residuals(points) / noise).sum() + 2 * len(fitted.terms) for fitted in fits]
    )
    weights = np.repeat(np.exp((criteria.min() - criteria) / 2), _NUM_DRAWS)
    bounds = []
    for index, time_s in enumerate(chosen.predict_times(targets).tolist()):
        low_s, high_s = _compute_weighted_interval(values[:, index], weights)
        bounds.append((min(low_s, time_s), max(high_s, time_s)))
    return bounds


def estimate_noise(chosen: FormulaFit, points: Sequence[ScalingPoint]) -> float:
    """Return the standard deviation of the logarithm of a time: the largest of several estimates.

    These are `MIN_NOISE`, the residuals of `chosen`, and the errors of leave-one-out predictions.
    """
    estimates = [MIN_NOISE]
    # A coefficient at its bound of 0 uses no degree of freedom.
    freedom = len(points) - int(np.count_nonzero(chosen.coefficients))
    if freedom > 0:
        estimates.append(float(np.sqrt(np.square(chosen.compute_log_residuals(points)).sum() / freedom)))
    # Repeated measurements are left out together. A speed is the images of one second, so its measurement is `images`.
    settings = [replace(each, time_s=1.0, images=each.images if chosen.has_fixed else 1.0) for each in points]
    left_out: list[float] = []
    for setting in dict.fromkeys(settings):
        others = [point for point, own_setting in zip(points, settings, strict=True) if own_setting != setting]
        if others and _select_identifiable_terms(chosen.terms, others) == chosen.terms:
            alone = [point for point, own_setting in zip(points, settings, strict=True) if own_setting == setting]
            fitted = fit_formula(chosen.formula, others, has_fixed=chosen.has_fixed)
            left_out += fitted.compute_log_residuals(alone).tolist()
    if left_out:
        estimates.append(float(np.sqrt(np.square(left_out).mean())))
    return max(estimates)


def _draw_predictions(
    fitted: FormulaFit, points: Sequence[ScalingPoint], targets: Sequence[ScalingPoint], noise: float
) -> np.ndarray:
    """Return drawn predictions of `targets` (columns) under noise of points and targets (rows), in seconds."""
    random = np.random.default_rng(0)  # the same draws for each form, and for each call
    times = _get_times(points)
    perturbed = times * np.exp(noise * random.standard_normal((_NUM_DRAWS, len(times))))
    columns = _build_design_matrix(fitted.terms, points)
    coefficients = _solve_linearized(columns, fitted.predict_times(points), perturbed)
    # For each of the two costs that no point has, assume as much as compute.
    is_identified = [any(point.ranks > 1 for point in points), any(point.nodes > 1 for point in points)]
    growth = [[_is_several(target.ranks), _grow_as_ring(target.nodes)] for target in targets]
    compute_s = _build_design_matrix([IMAGE_TERM], targets) * fitted.coefficients[0]
    unmeasured_s = compute_s * np.where(is_identified, 0.0, growth)
    unidentified = np.abs(UNMEASURED_COST * random.standard_normal((_NUM_DRAWS, 2))) @ unmeasured_s.T
    scatter = np.exp(noise * random.standard_normal((_NUM_DRAWS, len(targets))))
    drawn: np.ndarray = (coefficients @ _build_design_matrix(fitted.terms, targets).T + unidentified) * scatter
    return drawn


def _compute_weighted_interval(values: np.ndarray, weights: np.ndarray) -> tuple[float, float]:
    order = np.argsort(values)
    shares = np.cumsum(weights[order]) / weights.sum()
    edges = ((1 - _CONFIDENCE) / 2, (1 + _CONFIDENCE) / 2)
    low, high = (values[order][min(int(np.searchsorted(shares, edge)), len(values) - 1)] for edge in edges)
    return float(low), float(high)


def build_request(
    points: Sequence[ScalingPoint],
    at: Sequence[int],
    *,
    ranks_per_node: int,
    rank_batch: int | None = None,
    images: float | None = None,
    price: float | None = None,
) -> PredictionRequest:
    """Return the request; batch size and images default to those of the point with the most ranks."""
    largest = max(points, key=lambda point: point.ranks)
    return PredictionRequest(
        tuple(at), ranks_per_node, rank_batch or largest.rank_batch, images or largest.images, price
    )


def predict_from_points(points: Sequence[ScalingPoint], request: PredictionRequest, *, source: str) -> PredictionResult:
    """Return the prediction of a request, from at least one point; `source` names the table."""
    fitted = fit_formula(TWO_LEVELS, points, has_fixed=not are_speeds(points))
    targets = [
        ScalingPoint(ranks, request.count_nodes(ranks), request.rank_batch, request.images, 1.0) for ranks in request.at
    ]
    bounds = compute_bounds(fitted, points, targets)
    base = min(points, key=lambda point: point.ranks)
    return PredictionResult(
        basis="points",
        source=source,
        form=_TWO_LEVELS_TEXT,
        terms={term.name: float(value) for term, value in zip(fitted.terms, fitted.coefficients, strict=True)},
        points=tuple(_build_measured_point(point, base, fitted) for point in points),
        predictions=tuple(
            build_predicted(
                request,
                target.ranks,
                fitted.predict_parts(target),
                alone_s=_predict_alone_s(target, fitted),
                low_s=low_s,
                high_s=high_s,
            )
            for target, (low_s, high_s) in zip(targets, bounds, strict=True)
        ),
        notes=tuple(_iter_notes(fitted, points, request)),
    )


def _predict_alone_s(point: ScalingPoint, fitted: FormulaFit) -> float:
    return float(fitted.predict_times([replace(point, ranks=1, nodes=1)])[0])


def _build_measured_point(point: ScalingPoint, base: ScalingPoint, fitted: FormulaFit) -> MeasuredPoint:
    rate, base_rate = (each.images / each.time_s / each.ranks for each in (point, base))
    efficiency = rate / base_rate
    time_s = float(fitted.predict_times([point])[0])
    return MeasuredPoint(
        ranks=point.ranks,
        nodes=point.nodes,
        rank_batch=point.rank_batch,
        images=point.images,
        time_s=point.time_s,
        fitted_s=time_s,
        efficiency=efficiency,
        speedup=point.ranks * efficiency,
        fitted_efficiency=_predict_alone_s(point, fitted) / (point.ranks * time_s),
    )


def _iter_notes(fitted: FormulaFit, points: Sequence[ScalingPoint], request: PredictionRequest) -> Iterator[str]:
    for term in fitted.left_out:
        if term.part == FIXED_PART and not fitted.has_fixed:
            yield f"{term.name}: none, as points of equal time are speeds, which include no start-up"
        elif term == MULTI_RANK_TERM and all(point.ranks > 1 for point in points):
            yield f"{term.name}: included in t_s, as no point has one rank; efficiency is relative to several ranks"
        else:
            yield f"{term.name}: left out, as the points do not identify it ({term.identified_by} would)"
    noise = estimate_noise(fitted, points)
    if noise > MIN_NOISE:
        yield f"the points scatter by {share(noise)} about the formula, which widens the interval"
    most = max(point.ranks for point in points)
    # Errors of the formula grow with the distance from the measured points.
    far = [ranks for ranks in request.at if ranks > _MAX_EXTRAPOLATION * most]
    if far:
        over = f"over {_MAX_EXTRAPOLATION} times the {most:,} measured"
        yield f"{count(min(far), 'rank')} and more are {over}: a rough extrapolation"
    if not fitted.has_fixed:
        yield f"the points are speeds; the prediction is for {request.images:,.0f} images (or set --images)"
    elif len({point.images for point in points}) > 1:
        yield f"the points differ in images; the prediction is for {request.images:,.0f} (or set --images)"
