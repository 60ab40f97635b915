"""What a step of a run is made of, read from its run directory: the ground that a prediction stands on. Torch-free."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from paceline.core.errors import PacelineError, RecipeError
from paceline.core.experiments.folder import ExperimentDir
from paceline.core.files import read_bytes
from paceline.core.results import CommunicationResult, RunResult
from paceline.core.rundir import RunDir
from paceline.core.stages import EXPOSED
from paceline.lab.predict.points import POINTS
from paceline.lab.predict.simulate import Bucket, assumed, of_results
from paceline.recipe.load import load
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.parallel import Parallel

_DATA: Final = "data_wait"
_GRADIENT_BYTES: Final = 4
_MIB: Final = 1 << 20
_SENT_SHARE: Final[Mapping[str, float]] = {"bf16": 0.5, "fp16": 0.5}
"""What is sent of a gradient's bytes, by `parallel.compression`."""
_NOT_OF_A_STEP: Final = ("seed", "measure", "data.batch_size", "data.rank_batch_size", "train.steps", "train.epochs")
"""What two runs may differ in whose ranks do the same work in a step: their rank batches are compared apart."""
_WINDOW_STEPS: Final = 10
_TENTHS: Final = NormalDist().inv_cdf(0.9) - NormalDist().inv_cdf(0.1)
_LOCAL: Final = ("single", "local")


@dataclass(frozen=True)
class Step:
    """A step of a run on `ranks` ranks of `nodes` nodes, in seconds; means over its ranks and counted steps.

    `step_s` is all of it, and lies between `low_s` and `high_s`; `data_s` is waiting for data, `exposed_s` for other
    ranks and the wire. `late_s` of that is for a rank that is late again and again, `jitter_s` for now one and now
    another; `sigma_s` is how much a rank's own steps scatter. `fixed_s` is what a run takes beside its steps.
    `buckets` are none where the run does not tell of its gradients. `notes` say what was not measured.
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
    buckets: tuple[Bucket, ...]
    notes: tuple[str, ...] = ()

    @property
    def busy_s(self) -> float:
        """What a rank works in a step, and waits for data: all but waiting for others."""
        return self.step_s - self.exposed_s

    def with_fixed(self, fixed_s: float) -> "Step":
        """Return the step of a run that takes `fixed_s` beside its steps, as an empty run was measured to."""
        return replace(self, fixed_s=fixed_s)


class _Plan(BaseModel):
    """What is read of `plan.json`."""

    model_config = ConfigDict(frozen=True)

    batch_size: int = Field(gt=0)
    rank_batch: int = Field(gt=0)
    train_images: int = Field(gt=0)


class _Cost(BaseModel):
    """What is read of a profile's `cost`."""

    model_config = ConfigDict(frozen=True)

    parameters: int = 0


class _Profile(BaseModel):
    """What is read of `profile.json`, all of which may be missing."""

    model_config = ConfigDict(frozen=True)

    communication: CommunicationResult | None = None
    cost: _Cost | None = None


_Read = TypeVar("_Read", _Plan, _Profile)


def read_step(path: Path, *, ranks_per_node: int) -> Step:
    """Return what a step of the run in a folder is made of. Raise `PacelineError` where the folder does not tell.

    `ranks_per_node` is of a run that was started over several nodes, whose folder does not say how many they were.
    """
    _refuse_no_run(path)
    rundir = RunDir(path)
    result, section = rundir.read_result(), _recipe(path).parallel
    _refuse_no_ddp(section, path)
    plan, profile = _read(path / "plan.json", _Plan), _Profile()
    if rundir.profile.exists():
        profile = _read(rundir.profile, _Profile)
    if result.throughput.images_per_s <= 0:
        raise RecipeError(f"{path}: no step was counted after the warm-up (profile it with more --steps)")
    step_s = plan.batch_size / result.throughput.images_per_s
    low_s, high_s = (plan.batch_size / rate if rate > 0 else step_s for rate in reversed(result.throughput.spread))
    waits = _waits(result)
    sigma_s, why = _sigma(result, waits.jitter_s, high_s - low_s)
    found = profile.communication or result.communication
    parameters = result.trained_parameters or (profile.cost.parameters if profile.cost else 0)
    buckets, told = _buckets(found, parameters, _a_step(result, "backward"), section)
    return Step(
        source=str(path),
        ranks=result.world_size,
        nodes=_nodes(result, ranks_per_node),
        rank_batch=plan.rank_batch,
        images=plan.train_images,
        step_s=step_s,
        low_s=min(low_s, step_s),
        high_s=max(high_s, step_s),
        data_s=_a_step(result, _DATA),
        exposed_s=waits.exposed_s,
        late_s=waits.late_s,
        jitter_s=waits.jitter_s,
        sigma_s=sigma_s,
        fixed_s=_fixed(result),
        buckets=buckets,
        notes=(*why, *told),
    )


def refuse_another_recipe(run: Path, alone: Path) -> None:
    """Raise `RecipeError` where a run that is to tell what one rank computes has another recipe than `run`.

    Seed, length, measuring and the whole batch may differ, as they do not change what a rank computes in a step.
    """
    settings, others = (_settings(_recipe(path).to_dict()) for path in (run, alone))
    for path in [*settings, *(other for other in others if other not in settings)]:
        here, there = (found.get(path, "not set") for found in (settings, others))
        is_of_step = not any(path == each or path.startswith(f"{each}.") for each in _NOT_OF_A_STEP)
        if is_of_step and here != there:
            raise RecipeError(
                f"--alone: {alone}: {path} is {there}, and {here} in {run} (train the same recipe on one rank)"
            )


def _settings(values: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return each setting by its dotted path."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= _settings(value, f"{above}{name}.") if isinstance(value, dict) else {f"{above}{name}": value}
    return found


def _refuse_no_run(path: Path) -> None:
    """Raise `RecipeError` where a path is anything but a folder of a run."""
    folder = ExperimentDir(path)
    if folder.result.exists() or folder.trials.is_dir():
        points = path / POINTS
        fix = "name one of its runs, in trials/" + (f", or --points {points}" if points.exists() else "")
        raise RecipeError(f"{path}: is the folder of an experiment, no run ({fix})")
    if not path.is_dir():
        what = "is a file" if path.exists() else "there is no such folder"
        fix = "name the folder of a run, such as `paceline profile` writes; --points takes a table"
        raise RecipeError(f"{path}: {what}, and a prediction needs a run ({fix})")


def _refuse_no_ddp(section: Parallel, path: Path) -> None:
    """Raise `RecipeError` for a run that does not average gradients as ddp does, which is all that is known here."""
    if section.strategy != "ddp":
        raise RecipeError(
            f"{path}: parallel.strategy: {section.strategy} sends otherwise, and the prediction is of ddp "
            "(profile it with parallel.strategy=ddp)"
        )
    if not section.sync_gradients:
        raise RecipeError(
            f"{path}: parallel.sync_gradients: false sends no gradients, and the prediction is of ddp "
            "(profile it with parallel.sync_gradients=true)"
        )


def _recipe(path: Path) -> Recipe:
    return load(str(RunDir(path).recipe)).recipe


def expected_lateness(ranks: int) -> float:
    """Return how much later than the mean the latest of `ranks` Gaussians is, in standard deviations.

    Blom 1958 (Statistical Estimates and Transformed Beta-Variables): the quantile of (N - 3/8) / (N + 1/4), within
    5 % of the truth at N = 2 and 1 % from 10 on. It comes near sqrt(2 ln N) from below.
    """
    return NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))


@dataclass(frozen=True)
class _Waits:
    exposed_s: float
    late_s: float
    jitter_s: float


def _waits(result: RunResult) -> _Waits:
    """Return what ranks wait in a step, in the mean over them, and what of it is for the latest of them.

    The clock's `lost_s` is how much later the latest is than the mean of the others, which is W / (W - 1) times how
    much later it is than the mean of all.
    """
    ranks = result.ranks
    if not ranks:
        return _Waits(_a_step(result, EXPOSED), 0.0, 0.0)
    exposed_s = math.fsum(rank.stages.get(EXPOSED, 0.0) for rank in ranks) / len(ranks)
    if result.straggler is None:
        return _Waits(exposed_s, 0.0, 0.0)
    of_mean = (len(ranks) - 1) / len(ranks)
    lost_s, late_s = result.straggler.lost_s * of_mean, max(0.0, result.straggler.late_s) * of_mean
    return _Waits(exposed_s, late_s, max(0.0, lost_s - late_s))


def _sigma(result: RunResult, jitter_s: float, span_s: float) -> tuple[float, Sequence[str]]:
    """Return how much a rank's steps scatter: from how late the latest is, or where there is one rank, from windows.

    Windows of ten steps scatter less than steps, by sqrt(10) where those are independent.
    """
    if result.straggler is not None:
        return jitter_s / expected_lateness(result.world_size), ()
    if result.throughput.n < 2:
        return 0.0, ("stragglers: nothing is known of how steps scatter (profile with more --steps)",)
    told = "stragglers: guessed from how one rank's steps scatter (profile on two ranks or more to measure them)"
    return span_s / _TENTHS * math.sqrt(_WINDOW_STEPS), (told,)


def _buckets(
    found: CommunicationResult | None, parameters: int, backward_s: float, section: Parallel
) -> tuple[tuple[Bucket, ...], Sequence[str]]:
    """Return what a step sends, as it was measured or else as torch would: it counts a bucket before it compresses."""
    if found is not None and found.buckets:
        return of_results(found.buckets), ()
    if not parameters:
        return (), ()
    if section.compression == "powersgd":
        return (), ("buckets: how much powersgd sends is not known (profile on two ranks to measure it)",)
    bucket_bytes = None if section.bucket_mb == "auto" else round(section.bucket_mb * _MIB)
    made = assumed(_GRADIENT_BYTES * parameters, backward_s, bucket_bytes)
    sent = _SENT_SHARE.get(section.compression, 1.0)
    told = "buckets: assumed as torch makes them, ready evenly in backward (profile on two ranks to measure them)"
    return tuple(replace(each, num_bytes=round(sent * each.num_bytes)) for each in made), (told,)


def _a_step(result: RunResult, stage: str) -> float:
    """Return the seconds of a stage in a step, in the mean over ranks."""
    if result.ranks:
        return math.fsum(rank.stages.get(stage, 0.0) for rank in result.ranks) / len(result.ranks)
    steps = result.account.counted_steps if result.account else 0
    return result.stages[stage].device_s / steps if steps and stage in result.stages else 0.0


def _fixed(result: RunResult) -> float:
    """Return the seconds before the first step and after the last, which an empty run would take as well."""
    return result.time.startup_s + (result.account.finish_s if result.account else 0.0)


def _nodes(result: RunResult, ranks_per_node: int) -> int:
    is_here = result.provenance.get("launcher", "local") in _LOCAL
    return 1 if is_here else math.ceil(result.world_size / ranks_per_node)


def _read(path: Path, kind: type[_Read]) -> _Read:
    """Return what is read of a JSON file. Raise `PacelineError`, in one line, where it is missing or damaged."""
    try:
        return kind.model_validate_json(read_bytes(path))
    except ValidationError as error:
        first = error.errors()[0]
        reason = ": ".join([".".join(map(str, first["loc"])), first["msg"]]).removeprefix(": ")
        raise PacelineError(f"{path}: cannot be read: {reason} (run it again)") from None
    except OSError as error:
        raise PacelineError(f"{path}: cannot be read: {error.strerror} (run it again)") from None
