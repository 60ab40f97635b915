"""Predict training time on other numbers of ranks from one measured step."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from paceline.core.errors import RecipeError
from paceline.core.experiments.results import MeasuredPoint, Predicted, PredictionResult
from paceline.core.units import share
from paceline.lab.predict.network import NetworkModel, all_reduce_time_s
from paceline.lab.predict.points import PredictionRequest
from paceline.lab.predict.step import MeasuredStep, compute_exposed_s, expected_lateness

STEP_FORMULA: Final = "images / (N b) x (busy + exposed(N) + late + sigma e(N) + left) + F"
COMPUTE_PART: Final = "compute"
DATA_PART: Final = "data"
COMMUNICATION_PART: Final = "communication"
STRAGGLERS_PART: Final = "stragglers"
OVERHEAD_PART: Final = "overhead"
FIXED_PART: Final = "start_up"
_HOUR_S: Final = 3600.0
_FORMULA_UNCERTAINTY: Final = 0.05
"""Error of this formula at 4 to 8 times the measured ranks (docs/explanation/prediction.md)."""
_FIXED_UNCERTAINTY: Final = 0.5


@dataclass(frozen=True)
class StepModel:
    """A measured step, and the rest of it that the model does not explain.

    T(N) = images / (N b) step(N) + F, with step(N) = busy + exposed(N) + late + sigma e(N) + left: a rank's own work,
    communication that backward does not hide, a persistent straggler, the latest of N scattering ranks
    (`expected_lateness`), and the unexplained rest of every step of more than one rank. `contention_s` is the slowdown
    of compute by the bytes that two ranks send, 0 if unknown.
    """

    step: MeasuredStep
    network: NetworkModel
    busy_s: float
    contention_s: float
    left_s: float

    @property
    def data_s(self) -> float:
        """Seconds of `busy_s` that wait for data."""
        return min(self.step.data_s, self.busy_s)  # a single-rank run may have waited less for data

    def fitted_s(self) -> float:
        """Return the prediction of the measured step, in seconds."""
        step = self.step
        as_measured = PredictionRequest((step.ranks,), math.ceil(step.ranks / step.nodes), step.rank_batch, step.images)
        return math.fsum(self.compute_parts(step.ranks, as_measured).values())

    def compute_parts(
        self, ranks: int, request: PredictionRequest, network: NetworkModel | None = None, sigmas: float = 1.0
    ) -> dict[str, float]:
        """Return the seconds of a step on `ranks` ranks by part."""
        if ranks == 1:
            return self._compute_single_rank_parts(request)
        step, network = self.step, network or self.network
        batch_scale = request.rank_batch / step.rank_batch
        # A negative rest within nodes says nothing about the network between them, and vice versa.
        is_same_level = (_count_nodes(ranks, request) > 1) == (step.nodes > 1)
        left_s = self.left_s if is_same_level else max(0.0, self.left_s)
        buckets = [replace(bucket, ready_s=bucket.ready_s * batch_scale) for bucket in step.buckets]
        sent_s = compute_exposed_s(
            buckets, lambda size: all_reduce_time_s(size, ranks, request.ranks_per_node, network)
        )
        waits_s = step.late_s * batch_scale + step.sigma_s * batch_scale * expected_lateness(ranks) * sigmas
        return {
            **self._compute_single_rank_parts(request),
            COMPUTE_PART: (self.busy_s - self.data_s) * batch_scale + self.contention_s * _compute_ring_factor(ranks),
            COMMUNICATION_PART: sent_s,
            STRAGGLERS_PART: waits_s,
            OVERHEAD_PART: max(left_s, -sent_s - waits_s),  # the parts must not add up to less than compute
        }

    def _compute_single_rank_parts(self, request: PredictionRequest) -> dict[str, float]:
        batch_scale = request.rank_batch / self.step.rank_batch
        return {COMPUTE_PART: (self.busy_s - self.data_s) * batch_scale, DATA_PART: self.data_s * batch_scale}


def build_step_model(step: MeasuredStep, network: NetworkModel, alone: MeasuredStep | None = None) -> StepModel:
    """Return the model of a measured step; `alone` is a run of one rank, of the same recipe and rank batch.

    Raise `RecipeError` if `alone` is different, and for a step without gradient sizes.
    """
    if not step.buckets:
        fix = "run `paceline profile` on it, or train with measure.communication=on on two ranks"
        raise RecipeError(f"{step.source}: has no size of its gradients ({fix})")
    if alone is not None and (alone.ranks, alone.rank_batch) != (1, step.rank_batch):
        actual = f"{alone.ranks} ranks of {alone.rank_batch} images"
        raise RecipeError(f"{alone.source}: has {actual} (name a run of one rank of {step.rank_batch})")
    if step.ranks == 1:
        return StepModel(step, network, step.busy_s, 0.0, 0.0)
    # With a run of one rank the slowdown of compute by communication is known, too.
    busy_s = step.busy_s if alone is None else min(alone.busy_s, step.busy_s)
    contention_s = (step.busy_s - busy_s) / _compute_ring_factor(step.ranks)
    without_rest = StepModel(step, network, busy_s, contention_s, 0.0)
    return replace(without_rest, left_s=step.step_s - without_rest.fitted_s())


def predict_from_run(model: StepModel, request: PredictionRequest) -> PredictionResult:
    """Predict for all requested numbers of ranks. Raise `RecipeError` without an inter-node network."""
    step = model.step
    multi_node = [ranks for ranks in request.at if _count_nodes(ranks, request) > 1]
    if multi_node and not model.network.spans_nodes:
        fix = f"add one between nodes, such as {model.network.name}+ndr, or set --ranks-per-node"
        raise RecipeError(
            f"--network: {model.network.name} is within a node, but {multi_node[0]} ranks need several ({fix})"
        )
    point = MeasuredPoint(
        ranks=step.ranks,
        nodes=step.nodes,
        rank_batch=step.rank_batch,
        images=step.ranks * step.rank_batch,
        time_s=step.step_s,
        fitted_s=model.fitted_s(),
    )
    terms = {
        "busy_s": model.busy_s,
        "contention_s": model.contention_s,
        "late_s": step.late_s,
        "sigma_s": step.sigma_s,
        "left_s": model.left_s,
        "fixed_s": step.fixed_s,
    }
    return PredictionResult(
        basis="run",
        source=step.source,
        form=STEP_FORMULA,
        terms=terms,
        points=(point,),
        predictions=tuple(_build_prediction(model, request, ranks) for ranks in request.at),
        network=str(model.network),
        notes=tuple(_iter_notes(model, request)),
    )


def _build_prediction(model: StepModel, request: PredictionRequest, ranks: int) -> Predicted:
    parts = model.compute_parts(ranks, request)
    step_s = math.fsum(parts.values())
    num_steps = request.images / (ranks * request.rank_batch)
    time_s = num_steps * step_s + model.step.fixed_s
    below, above = _compute_uncertainty(model, request, ranks, num_steps)
    alone_s = request.images / request.rank_batch * math.fsum(model.compute_parts(1, request).values())
    gpu_hours = ranks * time_s / _HOUR_S
    of_run = {name: num_steps * each_s for name, each_s in parts.items()} | {FIXED_PART: model.step.fixed_s}
    return Predicted(
        ranks=ranks,
        nodes=_count_nodes(ranks, request),
        rank_batch=request.rank_batch,
        images=request.images,
        time_s=time_s,
        low_s=max(time_s - below, 0.0),
        high_s=time_s + above,
        step_s=step_s,
        images_per_s=ranks * request.rank_batch / step_s,
        efficiency=(alone_s + model.step.fixed_s) / (ranks * time_s),
        speedup=(alone_s + model.step.fixed_s) / time_s,
        gpu_hours=gpu_hours,
        cost=None if request.price is None else gpu_hours * request.price,
        parts=of_run,
        dominates=max((name for name in of_run if name != COMPUTE_PART), key=lambda name: of_run[name]),
    )


def _compute_uncertainty(
    model: StepModel, request: PredictionRequest, ranks: int, num_steps: float
) -> tuple[float, float]:
    """Return how many seconds less, and more, a run may take."""
    # Independent uncertainties, added in squares: the measured step, the bandwidth, the scatter of ranks (none, or
    # twice as much), the fixed cost, and the formula, whose error grows with the extrapolation.
    step = model.step
    batch_scale = request.rank_batch / step.rank_batch

    def run_s(network: NetworkModel, sigmas: float = 1.0) -> float:
        return num_steps * math.fsum(model.compute_parts(ranks, request, network, sigmas).values())

    predicted_s = run_s(model.network)
    extrapolation = max(0.0, math.log(ranks / step.ranks) / math.log(8)) if ranks > step.ranks else 0.0
    common = (_FIXED_UNCERTAINTY * step.fixed_s, _FORMULA_UNCERTAINTY * extrapolation * predicted_s)
    low, high = model.network.with_bandwidth("low"), model.network.with_bandwidth("high")
    below = (
        num_steps * batch_scale * (step.step_s - step.low_s),
        predicted_s - run_s(high),
        predicted_s - run_s(model.network, 0.0),
    )
    above = (
        num_steps * batch_scale * (step.high_s - step.step_s),
        run_s(low) - predicted_s,
        run_s(model.network, 2.0) - predicted_s,
    )
    return math.hypot(*common, *below), math.hypot(*common, *above)


def _iter_notes(model: StepModel, request: PredictionRequest) -> Iterator[str]:
    step = model.step
    yield from step.notes
    if request.rank_batch != step.rank_batch:
        yield (
            f"rank batch: {request.rank_batch} was not measured, but {step.rank_batch}; the whole step is assumed to "
            "scale with it, including its fixed costs"
        )
    on_node = math.ceil(step.ranks / step.nodes)
    if on_node != request.ranks_per_node and max(request.at) > on_node:
        yield (
            f"data: measured with {on_node} per node, but {request.ranks_per_node} will share its cores, disk and "
            "memory, which is not modeled (profile on a full node)"
        )
    if step.data_s > _FORMULA_UNCERTAINTY * step.step_s:
        yield f"data: {share(step.data_s / step.step_s)} of the measured step waits for data, as does the prediction"
    if abs(model.left_s) > _FORMULA_UNCERTAINTY * step.step_s:
        yield f"overhead: {share(model.left_s / step.step_s)} of the measured step is not explained by this network"


def _compute_ring_factor(ranks: int) -> float:
    # Bytes that a rank sends in a ring, as a multiple of the gradients.
    return 2 * (ranks - 1) / ranks


def _count_nodes(ranks: int, request: PredictionRequest) -> int:
    return math.ceil(ranks / request.ranks_per_node)
