"""Predict training time from a table of measured points."""

import math
from collections.abc import Iterator, Sequence
from typing import Final

from paceline.core.experiments.results import MeasuredPoint, Predicted, PredictionResult, are_speeds
from paceline.core.units import count, share
from paceline.lab.predict.fit import (
    COMPUTE_PART,
    FIXED_PART,
    MIN_NOISE,
    MULTI_RANK_TERM,
    TWO_LEVELS,
    FormulaFit,
    PredictionBounds,
    compute_bounds,
    count_steps,
    estimate_noise,
    fit_formula,
)
from paceline.lab.predict.points import PredictionRequest, ScalingPoint

_HOUR_S: Final = 3600.0
_MAX_EXTRAPOLATION: Final = 8
"""Multiple of the largest measured number of ranks beyond which a note warns."""


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
        at=tuple(at),
        ranks_per_node=ranks_per_node,
        rank_batch=rank_batch or largest.rank_batch,
        images=images or largest.images,
        price=price,
    )


def predict_from_points(
    points: Sequence[ScalingPoint], request: PredictionRequest, *, source: str, command: Sequence[str] = ()
) -> PredictionResult:
    """Return the prediction of a request, from at least one point; `source` names the table."""
    has_fixed = not are_speeds(points)
    fitted = fit_formula(TWO_LEVELS, points, has_fixed=has_fixed)
    targets = [_build_target_point(ranks, request) for ranks in request.at]
    bounds = compute_bounds(fitted, points, targets, has_fixed=has_fixed)
    return PredictionResult(
        basis="points",
        source=source,
        form=TWO_LEVELS.text,
        terms={term.name: float(value) for term, value in zip(fitted.terms, fitted.coefficients, strict=True)},
        points=tuple(_build_measured_point(point, _find_baseline_point(points), fitted) for point in points),
        predictions=tuple(
            _build_prediction(target, fitted, bound, request.price)
            for target, bound in zip(targets, bounds, strict=True)
        ),
        notes=tuple(_iter_notes(fitted, points, request, has_fixed=has_fixed)),
        command=tuple(command),
    )


def _build_target_point(ranks: int, request: PredictionRequest) -> ScalingPoint:
    nodes = math.ceil(ranks / request.ranks_per_node)
    return ScalingPoint(ranks, nodes, request.rank_batch, request.images, 1.0)


def _find_baseline_point(points: Sequence[ScalingPoint]) -> ScalingPoint:
    return min(points, key=lambda point: point.ranks)


def _build_measured_point(point: ScalingPoint, base: ScalingPoint, fitted: FormulaFit) -> MeasuredPoint:
    efficiency = _compute_rank_throughput(point) / _compute_rank_throughput(base)
    alone = ScalingPoint(1, 1, point.rank_batch, point.images, 1.0)
    alone_s, time_s = (float(each) for each in fitted.predict_times([alone, point]))
    return MeasuredPoint(
        ranks=point.ranks,
        nodes=point.nodes,
        rank_batch=point.rank_batch,
        images=point.images,
        time_s=point.time_s,
        fitted_s=time_s,
        efficiency=efficiency,
        speedup=point.ranks * efficiency,
        fitted_efficiency=alone_s / (point.ranks * time_s),
    )


def _compute_rank_throughput(point: ScalingPoint) -> float:
    return point.images / point.time_s / point.ranks


def _build_prediction(
    target: ScalingPoint, fitted: FormulaFit, bounds: PredictionBounds, price: float | None
) -> Predicted:
    alone = ScalingPoint(1, 1, target.rank_batch, target.images, 1.0)
    alone_s, time_s = (float(each) for each in fitted.predict_times([alone, target]))
    parts = fitted.predict_parts(target)
    step_s = math.fsum(value for name, value in parts.items() if name != FIXED_PART) / count_steps(target)
    lost = {name: value for name, value in parts.items() if name != COMPUTE_PART and value > 0}
    gpu_hours = target.ranks * time_s / _HOUR_S
    return Predicted(
        ranks=target.ranks,
        nodes=target.nodes,
        rank_batch=target.rank_batch,
        images=target.images,
        time_s=time_s,
        low_s=bounds.low_s,
        high_s=bounds.high_s,
        step_s=step_s,
        images_per_s=target.ranks * target.rank_batch / step_s,
        efficiency=alone_s / (target.ranks * time_s),
        speedup=alone_s / time_s,
        gpu_hours=gpu_hours,
        cost=None if price is None else gpu_hours * price,
        parts=parts,
        dominates=max(lost, key=lambda name: lost[name], default=""),
    )


def _iter_notes(
    fitted: FormulaFit, points: Sequence[ScalingPoint], request: PredictionRequest, *, has_fixed: bool
) -> Iterator[str]:
    for term in fitted.left_out:
        if term.part == FIXED_PART and not has_fixed:
            yield f"{term.name}: none, as points of equal time are speeds, which include no start-up"
        elif term == MULTI_RANK_TERM and all(point.ranks > 1 for point in points):
            yield f"{term.name}: included in t_s, as no point has one rank; efficiency is relative to several ranks"
        else:
            yield f"{term.name}: left out, as the points do not identify it ({term.identified_by} would)"
    noise = estimate_noise(fitted, points, has_fixed=has_fixed)
    if noise > MIN_NOISE:
        yield f"the points scatter by {share(noise)} about the formula, which widens the interval"
    most = max(point.ranks for point in points)
    # Errors of the formula grow with the distance from the measured points.
    far = [ranks for ranks in request.at if ranks > _MAX_EXTRAPOLATION * most]
    if far:
        over = f"over {_MAX_EXTRAPOLATION} times the {most:,} measured"
        yield f"{count(min(far), 'rank')} and more are {over}: a rough extrapolation"
    if not has_fixed:
        yield f"the points are speeds; the prediction is for {request.images:,.0f} images (or set --images)"
    if len({point.images for point in points}) > 1 and has_fixed:
        yield f"the points differ in images; the prediction is for {request.images:,.0f} (or set --images)"
