"""Read the parts of a training step from a run directory, and simulate how its gradient buckets are sent."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from paceline.core.errors import PacelineError, RecipeError
from paceline.core.experiments.experiment_dir import ExperimentDir
from paceline.core.files import read_bytes
from paceline.core.results import BucketResult, CommunicationResult, RunResult
from paceline.core.run_dir import RunDir
from paceline.core.stages import EXPOSED
from paceline.lab.predict.points import POINTS_FILE
from paceline.recipe.load import load
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.train import Parallel

FIRST_BYTES: Final = 1 << 20
BUCKET_BYTES: Final = 25 << 20
"""Torch's `bucket_cap_mb`, after a first bucket of 1 MiB."""
_DATA_STAGE: Final = "data_wait"
_GRADIENT_BYTES: Final = 4
_MIB: Final = 1 << 20
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
    sizes = _split_into_buckets(num_bytes, bucket_bytes or FIRST_BYTES, bucket_bytes or BUCKET_BYTES)
    sent, buckets = 0, []
    for each in sizes:
        sent += each
        buckets.append(GradientBucket(each, backward_s * (sent - sizes[0]) / num_bytes))
    return tuple(buckets)


def _split_into_buckets(num_bytes: int, first: int, others: int) -> list[int]:
    sizes = [min(first, num_bytes)]
    while (left := num_bytes - sum(sizes)) > 0:
        sizes.append(min(others, left))
    return sizes


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

    def with_fixed(self, fixed_s: float) -> "MeasuredStep":
        """Return the step with `fixed_s` seconds outside of steps."""
        return replace(self, fixed_s=fixed_s)


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
    cost: _ProfileCost | None = None


_JsonModel = TypeVar("_JsonModel", _PlanFile, _ProfileFile)


def read_measured_step(path: Path, *, ranks_per_node: int) -> MeasuredStep:
    """Read a step from a run directory. Raise `PacelineError` if the directory lacks it.

    `ranks_per_node` is needed for runs over several nodes, which do not record their number.
    """
    _check_is_run(path)
    rundir = RunDir(path)
    result, section = rundir.read_result(), _load_recipe(path).parallel
    _check_is_ddp(section, path)
    plan, profile = _read_json_model(path / "plan.json", _PlanFile), _ProfileFile()
    if rundir.profile.exists():
        profile = _read_json_model(rundir.profile, _ProfileFile)
    if result.throughput.images_per_s <= 0:
        raise RecipeError(f"{path}: no step was measured after the warm-up (profile it with more --steps)")
    step_s = plan.batch_size / result.throughput.images_per_s
    # The highest rate is the shortest step.
    low_s, high_s = (plan.batch_size / rate if rate > 0 else step_s for rate in reversed(result.throughput.spread))
    waits = _compute_wait_times(result)
    sigma_s, scatter_notes = _estimate_step_scatter(result, waits.jitter_s, high_s - low_s)
    # A profile has timed buckets, which slow a plain run down and are off there.
    communication = profile.communication or result.communication
    parameters = result.trained_parameters or (profile.cost.parameters if profile.cost else 0)
    buckets, bucket_notes = _find_buckets(communication, parameters, _get_stage_per_step_s(result, "backward"), section)
    return MeasuredStep(
        source=str(path),
        ranks=result.world_size,
        nodes=_count_nodes(result, ranks_per_node),
        rank_batch=plan.rank_batch,
        images=plan.train_images,
        step_s=step_s,
        low_s=min(low_s, step_s),
        high_s=max(high_s, step_s),
        data_s=_get_stage_per_step_s(result, _DATA_STAGE),
        exposed_s=waits.exposed_s,
        late_s=waits.late_s,
        jitter_s=waits.jitter_s,
        sigma_s=sigma_s,
        fixed_s=_compute_fixed_s(result),
        buckets=buckets,
        notes=(*scatter_notes, *bucket_notes),
    )


def check_same_recipe(run: Path, alone: Path) -> None:
    """Raise `RecipeError` if the single-rank run `alone` has another recipe than `run`.

    Seed, length, measurement and global batch size may differ.
    """
    settings, other_settings = (_flatten_settings(_load_recipe(path).to_dict()) for path in (run, alone))
    for path in [*settings, *(other for other in other_settings if other not in settings)]:
        value, other_value = (values.get(path, "not set") for values in (settings, other_settings))
        is_of_step = not any(path == each or path.startswith(f"{each}.") for each in _IGNORED_SETTINGS)
        if is_of_step and value != other_value:
            raise RecipeError(
                f"--alone: {alone}: {path} is {other_value}, but {value} in {run} (train the same recipe on one rank)"
            )


def _flatten_settings(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for name, value in values.items():
        settings |= (
            _flatten_settings(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
        )
    return settings


def _check_is_run(path: Path) -> None:
    folder = ExperimentDir(path)
    if folder.result.exists() or folder.trials.is_dir():
        points = path / POINTS_FILE
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


@dataclass(frozen=True)
class _WaitTimes:
    exposed_s: float
    late_s: float
    jitter_s: float


def _compute_wait_times(result: RunResult) -> _WaitTimes:
    # A result without rows per rank has the stages of rank 0 only.
    ranks = result.ranks
    if not ranks:
        return _WaitTimes(_get_stage_per_step_s(result, EXPOSED), 0.0, 0.0)
    exposed_s = math.fsum(rank.stages.get(EXPOSED, 0.0) for rank in ranks) / len(ranks)
    if result.straggler is None:
        return _WaitTimes(exposed_s, 0.0, 0.0)
    # The clock's `lost_s` is relative to the mean of the others, which is W / (W - 1) times the lateness relative to
    # the mean of all W.
    of_mean = (len(ranks) - 1) / len(ranks)
    lost_s, late_s = result.straggler.lost_s * of_mean, max(0.0, result.straggler.late_s) * of_mean
    return _WaitTimes(exposed_s, late_s, max(0.0, lost_s - late_s))


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
    if result.ranks:
        return math.fsum(rank.stages.get(stage, 0.0) for rank in result.ranks) / len(result.ranks)
    steps = result.account.counted_steps if result.account else 0
    return result.stages[stage].device_s / steps if steps and stage in result.stages else 0.0


def _compute_fixed_s(result: RunResult) -> float:
    return result.time.startup_s + (result.account.finish_s if result.account else 0.0)


def _count_nodes(result: RunResult, ranks_per_node: int) -> int:
    is_local = result.provenance.get("launcher", "local") in _LOCAL_LAUNCHERS
    return 1 if is_local else math.ceil(result.world_size / ranks_per_node)


def _read_json_model(path: Path, kind: type[_JsonModel]) -> _JsonModel:
    try:
        return kind.model_validate_json(read_bytes(path))
    except ValidationError as error:
        first = error.errors()[0]
        reason = ": ".join([".".join(map(str, first["loc"])), first["msg"]]).removeprefix(": ")
        raise PacelineError(f"{path}: cannot be read: {reason} (run it again)") from None
    except OSError as error:
        raise PacelineError(f"{path}: cannot be read: {error.strerror} (run it again)") from None
