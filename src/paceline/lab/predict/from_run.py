"""Predict training time on other numbers of ranks from one measured step, read from a run directory."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist
from typing import Final, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from paceline.core.errors import PacelineError, RecipeError
from paceline.core.experiments.experiment_dir import ExperimentDir
from paceline.core.experiments.results import MeasuredPoint, Predicted, PredictionResult
from paceline.core.files import read_bytes
from paceline.core.results import BucketResult, CommunicationResult, RunResult, stage_seconds
from paceline.core.run_dir import RunDir
from paceline.core.stages import DATA_WAIT, EXPOSED
from paceline.core.units import share
from paceline.lab.predict.network import NetworkModel, all_reduce_time_s
from paceline.lab.predict.points import COMPUTE_PART, FIXED_PART, PredictionRequest, build_predicted
from paceline.recipe.load import iter_settings, load
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.train import Parallel

STEP_FORMULA: Final = "images / (N b) x (busy + exposed(N) + late + sigma e(N) + left) + F"
DATA_PART: Final = "data"
COMMUNICATION_PART: Final = "communication"
STRAGGLERS_PART: Final = "stragglers"
OVERHEAD_PART: Final = "overhead"
_FORMULA_UNCERTAINTY: Final = 0.05
"""Error of this formula at 4 to 8 times the measured ranks (docs/explanation/prediction.md)."""
_FIXED_UNCERTAINTY: Final = 0.5
_MIB: Final = 1 << 20
_FIRST_BYTES: Final = 1 * _MIB
_BUCKET_BYTES: Final = 25 * _MIB
"""Torch's `bucket_cap_mb`, after a first bucket of 1 MiB."""
_GRADIENT_BYTES: Final = 4
_SENT_SHARE: Final[Mapping[str, float]] = {"bf16": 0.5, "fp16": 0.5}
"""Share of the gradients' bytes that is sent, by `parallel.compression`."""
_IGNORED_SETTINGS: Final = ("seed", "measure", "data.batch_size", "data.rank_batch_size", "train.steps", "train.epochs")
"""Settings that may differ between two runs; their rank batches are compared separately."""
_WINDOW_STEPS: Final = 10
_P10_TO_P90_SIGMAS: Final = NormalDist().inv_cdf(0.9) - NormalDist().inv_cdf(0.1)
_LOCAL_LAUNCHERS: Final = ("single", "local")


@dataclass(frozen=True)
class GradientBucket:
    """Gradients that are sent together, ready `ready_s` seconds after the first ones of the step."""

    num_bytes: int
    ready_s: float


def compute_exposed_s(buckets: Sequence[GradientBucket], all_reduce_s: Callable[[int], float]) -> float:
    """Return the seconds of communication after backward ends, with the last bucket ready.

    `all_reduce_s` returns the seconds of an all-reduce of a number of bytes.
    """
    # DDP sends each bucket when its gradients are ready, one at a time (Li et al. 2020, arXiv 2006.15704). Not modeled:
    # concurrent buckets, and backward slowed down by communication.
    free_s = backward_ends_s = 0.0
    for bucket in buckets:
        free_s = max(free_s, bucket.ready_s) + all_reduce_s(bucket.num_bytes)
        backward_ends_s = max(backward_ends_s, bucket.ready_s)
    return max(0.0, free_s - backward_ends_s)


def convert_buckets(buckets: Sequence[BucketResult]) -> tuple[GradientBucket, ...]:
    """Return measured buckets, with times relative to the first."""
    first_s = min((bucket.ready_s for bucket in buckets), default=0.0)
    return tuple(GradientBucket(bucket.bytes, bucket.ready_s - first_s) for bucket in buckets)


def assume_buckets(num_bytes: int, backward_s: float, bucket_bytes: int | None = None) -> tuple[GradientBucket, ...]:
    """Return the buckets that torch would make, ready in backward in proportion to their bytes.

    `bucket_bytes` is the configured size, also of the first bucket; None for torch's default.
    """
    # Gradients of the last layers come first. If early layers, with few weights, take most of the time, more
    # communication is hidden than assumed here.
    sent = first = min(bucket_bytes or _FIRST_BYTES, num_bytes)
    buckets = [GradientBucket(first, 0.0)]
    while sent < num_bytes:
        size = min(bucket_bytes or _BUCKET_BYTES, num_bytes - sent)
        sent += size
        buckets.append(GradientBucket(size, backward_s * (sent - first) / num_bytes))
    return tuple(buckets)


@dataclass(frozen=True)
class MeasuredStep:
    """A step of a run on `ranks` ranks of `nodes` nodes, in seconds; means over ranks and measured steps.

    `step_s` is the whole step, between `low_s` and `high_s`; `data_s` is the wait for data, `exposed_s` for other ranks
    and communication. Of that, `late_s` is caused by a persistent straggler and `jitter_s` by changing ones. `sigma_s`
    is the standard deviation of a rank's steps, and `fixed_s` the time of a run outside of its steps. `buckets` is
    empty if the run has no gradient sizes. `notes` list what was not measured.
    """

    source: str
    ranks: int
    nodes: int
    rank_batch: int
    images: int
    step_s: float
    low_s: float
    high_s: float
    data_s: float
    exposed_s: float
    late_s: float
    jitter_s: float
    sigma_s: float
    fixed_s: float
    buckets: tuple[GradientBucket, ...]
    notes: tuple[str, ...] = ()

    @property
    def busy_s(self) -> float:
        """Seconds of compute and data wait per step."""
        return self.step_s - self.exposed_s


class _PlanFile(BaseModel):
    """Fields read from `plan.json`."""

    model_config = ConfigDict(frozen=True)

    batch_size: int = Field(gt=0)
    rank_batch: int = Field(gt=0)
    train_images: int = Field(gt=0)


class _ProfileCost(BaseModel):
    """Fields read from a profile's `cost`."""

    model_config = ConfigDict(frozen=True)

    parameters: int = 0


class _ProfileFile(BaseModel):
    """Fields read from `profile.json`, all optional."""

    model_config = ConfigDict(frozen=True)

    communication: CommunicationResult | None = None
    cost: _ProfileCost = _ProfileCost()


_JsonModel = TypeVar("_JsonModel", _PlanFile, _ProfileFile)


def read_measured_step(path: Path, *, ranks_per_node: int) -> MeasuredStep:
    """Read a step from a run directory. Raise `PacelineError` if the directory lacks it.

    `ranks_per_node` is needed for runs over several nodes, which do not record their number.
    """
    _check_is_run(path)
    rundir = RunDir(path)
    result, section = rundir.read_result(), _load_recipe(path).parallel
    _check_is_ddp(section, path)
    plan = _read_json_model(path / "plan.json", _PlanFile)
    profile = _read_json_model(rundir.profile, _ProfileFile) if rundir.profile.exists() else _ProfileFile()
    if result.throughput.images_per_s <= 0:
        raise RecipeError(f"{path}: no step was measured after the warm-up (profile it with more --steps)")
    step_s = plan.batch_size / result.throughput.images_per_s
    # The highest rate is the shortest step.
    low_s, high_s = (plan.batch_size / rate if rate > 0 else step_s for rate in reversed(result.throughput.spread))
    exposed_s = _get_stage_per_step_s(result, EXPOSED)
    late_s, jitter_s = _compute_lateness(result)
    sigma_s, scatter_notes = _estimate_step_scatter(result, jitter_s, high_s - low_s)
    is_local = result.provenance.get("launcher", "local") in _LOCAL_LAUNCHERS
    # A profile has timed buckets, which slow a plain run down and are off there.
    communication = profile.communication or result.communication
    parameters = result.trained_parameters or profile.cost.parameters
    buckets, bucket_notes = _find_buckets(communication, parameters, _get_stage_per_step_s(result, "backward"), section)
    return MeasuredStep(
        source=str(path),
        ranks=result.world_size,
        nodes=1 if is_local else math.ceil(result.world_size / ranks_per_node),
        rank_batch=plan.rank_batch,
        images=plan.train_images,
        step_s=step_s,
        low_s=min(low_s, step_s),
        high_s=max(high_s, step_s),
        data_s=_get_stage_per_step_s(result, DATA_WAIT),
        exposed_s=exposed_s,
        late_s=late_s,
        jitter_s=jitter_s,
        sigma_s=sigma_s,
        fixed_s=result.time.startup_s + (result.account.finish_s if result.account else 0.0),
        buckets=buckets,
        notes=(*scatter_notes, *bucket_notes),
    )


def check_same_recipe(run: Path, alone: Path) -> None:
    """Raise `RecipeError` if the single-rank run `alone` has another recipe than `run`.

    Seed, length, measurement and global batch size may differ.
    """
    settings, other_settings = (dict(iter_settings(_load_recipe(path).to_dict())) for path in (run, alone))
    for path in [*settings, *(other for other in other_settings if other not in settings)]:
        value, other_value = (values.get(path, "not set") for values in (settings, other_settings))
        is_of_step = not any(path == each or path.startswith(f"{each}.") for each in _IGNORED_SETTINGS)
        if is_of_step and value != other_value:
            raise RecipeError(
                f"--alone: {alone}: {path} is {other_value}, but {value} in {run} (train the same recipe on one rank)"
            )


def _check_is_run(path: Path) -> None:
    folder = ExperimentDir(path)
    if folder.result.exists() or folder.trials.is_dir():
        points = folder.points
        fix = "name one of its runs, in trials/" + (f", or --points {points}" if points.exists() else "")
        raise RecipeError(f"{path}: is the folder of an experiment, not of a run ({fix})")
    if not path.is_dir():
        what = "is a file" if path.exists() else "no such folder"
        fix = "name the folder of a run, such as `paceline profile` writes; --points takes a table"
        raise RecipeError(f"{path}: {what}; a prediction needs a run ({fix})")


def _check_is_ddp(section: Parallel, path: Path) -> None:
    if section.strategy != "ddp":
        raise RecipeError(
            f"{path}: parallel.strategy: {section.strategy} communicates differently, and only ddp is modeled "
            "(profile it with parallel.strategy=ddp)"
        )
    if not section.sync_gradients:
        raise RecipeError(
            f"{path}: parallel.sync_gradients: false sends no gradients, and only ddp is modeled "
            "(profile it with parallel.sync_gradients=true)"
        )


def _load_recipe(path: Path) -> Recipe:
    return load(str(RunDir(path).recipe)).recipe


def expected_lateness(ranks: int) -> float:
    """Return the expected maximum of `ranks` standard normal variables, in standard deviations.

    Blom 1958 (Statistical Estimates and Transformed Beta-Variables): the quantile of (N - 3/8) / (N + 1/4), within 5 %
    at N = 2 and 1 % from 10 on. Approaches sqrt(2 ln N) from below.
    """
    return NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))


def _compute_lateness(result: RunResult) -> tuple[float, float]:
    """Return the seconds per step of a persistent straggler, and of changing ones."""
    if not result.ranks or result.straggler is None:
        return 0.0, 0.0
    # The clock's `lost_s` is relative to the mean of the others, which is W / (W - 1) times the lateness relative to
    # the mean of all W.
    of_mean = (len(result.ranks) - 1) / len(result.ranks)
    lost_s, late_s = result.straggler.lost_s * of_mean, max(0.0, result.straggler.late_s) * of_mean
    return late_s, max(0.0, lost_s - late_s)


def _estimate_step_scatter(result: RunResult, jitter_s: float, span_s: float) -> tuple[float, Sequence[str]]:
    if result.straggler is not None:
        return jitter_s / expected_lateness(result.world_size), ()
    if result.throughput.n < 2:
        return 0.0, ("stragglers: the scatter of steps is unknown (profile with more --steps)",)
    # Windows of ten independent steps scatter less than steps, by sqrt(10).
    note = "stragglers: guessed from how one rank's steps scatter (profile on two ranks or more to measure them)"
    return span_s / _P10_TO_P90_SIGMAS * math.sqrt(_WINDOW_STEPS), (note,)


def _find_buckets(
    found: CommunicationResult | None, parameters: int, backward_s: float, section: Parallel
) -> tuple[tuple[GradientBucket, ...], Sequence[str]]:
    if found is not None and found.buckets:
        return convert_buckets(found.buckets), ()
    if not parameters:
        return (), ()
    if section.compression == "powersgd":
        return (), ("buckets: the bytes that powersgd sends are unknown (profile on two ranks to measure them)",)
    # Torch sizes buckets before compression.
    bucket_bytes = None if section.bucket_mb == "auto" else round(section.bucket_mb * _MIB)
    made = assume_buckets(_GRADIENT_BYTES * parameters, backward_s, bucket_bytes)
    sent = _SENT_SHARE.get(section.compression, 1.0)
    note = "buckets: assumed as torch makes them, ready evenly in backward (profile on two ranks to measure them)"
    return tuple(replace(each, num_bytes=round(sent * each.num_bytes)) for each in made), (note,)


def _get_stage_per_step_s(result: RunResult, stage: str) -> float:
    """Return the mean over ranks; a result without rows per rank has the stages of rank 0 only."""
    if result.ranks:
        return math.fsum(rank.stages.get(stage, 0.0) for rank in result.ranks) / len(result.ranks)
    return stage_seconds(result, stage)


def _read_json_model(path: Path, kind: type[_JsonModel]) -> _JsonModel:
    try:
        return kind.model_validate_json(read_bytes(path))
    except ValidationError as error:
        first = error.errors()[0]
        reason = ": ".join([".".join(map(str, first["loc"])), first["msg"]]).removeprefix(": ")
        raise PacelineError(f"{path}: cannot be read: {reason} (run it again)") from None
    except OSError as error:
        raise PacelineError(f"{path}: cannot be read: {error.strerror} (run it again)") from None


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
        is_same_level = (request.count_nodes(ranks) > 1) == (step.nodes > 1)
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
    multi_node = [ranks for ranks in request.at if request.count_nodes(ranks) > 1]
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
    num_steps, fixed_s = request.images / (ranks * request.rank_batch), model.step.fixed_s
    parts = {name: num_steps * each_s for name, each_s in model.compute_parts(ranks, request).items()}
    parts[FIXED_PART] = fixed_s
    time_s = math.fsum(parts.values())
    below_s, above_s = _compute_uncertainty(model, request, ranks, num_steps)
    alone_s = request.images / request.rank_batch * math.fsum(model.compute_parts(1, request).values()) + fixed_s
    return build_predicted(
        request, ranks, parts, alone_s=alone_s, low_s=max(time_s - below_s, 0.0), high_s=time_s + above_s
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
    below, above = (
        math.hypot(
            *common,
            num_steps * batch_scale * (measured_s - step.step_s),
            run_s(model.network.with_bandwidth(bandwidth)) - predicted_s,
            run_s(model.network, sigmas) - predicted_s,
        )
        for measured_s, bandwidth, sigmas in ((step.low_s, "high", 0.0), (step.high_s, "low", 2.0))
    )
    return below, above


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
