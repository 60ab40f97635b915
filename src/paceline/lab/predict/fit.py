"""Fit scaling formulas to measured points, with 95 % prediction intervals. Pure."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from paceline.lab.predict.points import ScalingPoint

GrowthFunction = Callable[[ScalingPoint], float]
COMPUTE_PART: Final = "compute"
FIXED_PART: Final = "start_up"
_INDEPENDENCE_TOLERANCE: Final = 1e-6
"""A column identifies its term if this share of its length lies outside the others' span."""
_MIN_COMPUTE_SHARE: Final = 0.01
"""Smallest share of compute in the fastest point; otherwise tables without any scaling would fit 0."""
_MAX_STEPS: Final = 50
_MAX_HALVINGS: Final = 20
_CONVERGENCE_TOLERANCE: Final = 1e-12
MIN_NOISE: Final = 0.03
"""Relative standard deviation of a time about its formula, unless the points show a larger one."""
UNMEASURED_COST: Final = 0.08
"""Standard deviation of the cost per step of several ranks, and of several nodes, if no point has them.

As a share of compute; the upper half of a normal distribution is drawn.
"""
_CONFIDENCE: Final = 0.95
_NUM_DRAWS: Final = 500


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
"""The formula used for predictions, of n nodes and N ranks; `docs/explanation/prediction.md` derives it.

t_s is the time of an image on one rank, c1_s the cost per step of several ranks, c2_s that between nodes, and f_s the
fixed cost. 2 (n - 1) / n is the share of the gradients that a ring of n nodes moves (Patarasuk and Yuan 2009, doi
10.1016/j.jpdc.2008.09.002).
"""


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
    """Fit `form` to at least one point; `has_fixed` if times are of whole runs, including start-up."""
    candidates = [term for term in form.terms if has_fixed or term.part != FIXED_PART]
    terms = select_identifiable_terms(candidates, points)
    columns = build_design_matrix(terms, points)
    times = np.array([point.time_s for point in points])
    left_out = tuple(term for term in form.terms if term not in terms)
    return FormulaFit(form, terms, solve_coefficients(columns, times), left_out)


def select_identifiable_terms(terms: Sequence[Term], points: Sequence[ScalingPoint]) -> tuple[Term, ...]:
    """Return the terms that `points` identify given the previous ones; the first is always included."""
    times = np.array([point.time_s for point in points])
    identified: list[Term] = []
    basis: list[np.ndarray] = []
    for term in terms:
        column = build_design_matrix([term], points)[:, 0] / times
        rest = column.copy()
        for direction in basis * 2:  # orthogonalize twice, as one pass leaves rounding errors
            rest -= (direction @ rest) * direction
        length = float(np.linalg.norm(rest))
        if length > _INDEPENDENCE_TOLERANCE * float(np.linalg.norm(column)) or not identified:
            identified.append(term)
            basis.append(rest / length)
    return tuple(identified)


def solve_coefficients(columns: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Return the coefficients >= 0 for which `columns @ coefficients` is closest to `times` in the logarithm.

    `columns` are points x terms, float64, non-negative; the first, of compute, is positive, as is its coefficient.
    """
    # In the logarithm an error of 5 % weighs the same for a minute and for a day. Each Gauss-Newton step is a
    # non-negative least-squares problem (Lawson and Hanson 1974).
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
    from scipy.optimize import nnls  # type: ignore[import-untyped]  # loading it takes a fifth of a second

    bounded: np.ndarray = least + nnls(columns, targets - columns @ least)[0]
    return bounded


def _backtrack(relative: np.ndarray, current: np.ndarray, target: np.ndarray) -> np.ndarray | None:
    error = _compute_squared_error(relative, current)
    for halving in range(_MAX_HALVINGS):
        candidate: np.ndarray = current + (target - current) / 2**halving
        if _compute_squared_error(relative, candidate) < error - _CONVERGENCE_TOLERANCE:
            return candidate
    return None


def _compute_squared_error(relative: np.ndarray, coefficients: np.ndarray) -> float:
    fitted = relative @ coefficients
    return float(np.square(np.log(fitted)).sum()) if (fitted > 0).all() else np.inf


@dataclass(frozen=True)
class PredictionBounds:
    """Bounds of a run's seconds, with 95 % confidence."""

    low_s: float
    high_s: float


def compute_bounds(
    chosen: FormulaFit, points: Sequence[ScalingPoint], targets: Sequence[ScalingPoint], *, has_fixed: bool
) -> list[PredictionBounds]:
    """Return the bounds of each of `targets`, whose `time_s` is ignored; they include the prediction of `chosen`."""
    # Three unknowns are drawn many times: the noise of points, the formula (weighted by likelihood), and costs that no
    # point identifies. `docs/explanation/prediction.md` has the calibration of the constants.
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

    These are `MIN_NOISE`, the residuals of `chosen`, and the errors of leave-one-out predictions.
    """
    estimates = [MIN_NOISE]
    # A coefficient at its bound of 0 uses no degree of freedom.
    freedom = len(points) - int(np.count_nonzero(chosen.coefficients))
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
    # A speed is written as the images of one second, so its measurement is `images`.
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
    """Return the unidentified cost of several ranks and of several nodes (columns) per target (rows), in seconds."""
    # Assume as much as compute for each of the two that no point has.
    computing = build_design_matrix([IMAGE_TERM], targets)[:, 0] * fitted.coefficients[0]
    is_identified = [any(point.ranks > 1 for point in points), any(point.nodes > 1 for point in points)]
    growth = [[float(target.ranks > 1), 2 * (target.nodes - 1) / target.nodes] for target in targets]
    added: np.ndarray = computing[:, None] * np.where(is_identified, 0.0, growth)
    return added


def _compute_weighted_interval(values: np.ndarray, weights: np.ndarray) -> tuple[float, float]:
    order = np.argsort(values)
    shares = np.cumsum(weights[order]) / weights.sum()
    edges = ((1 - _CONFIDENCE) / 2, (1 + _CONFIDENCE) / 2)
    low, high = (values[order][min(int(np.searchsorted(shares, edge)), len(values) - 1)] for edge in edges)
    return float(low), float(high)
