"""Read the two runs of `paceline why`: watched folders or run directories, as one form that can be compared."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum, isnan
from pathlib import Path
from typing import Final, Literal

from paceline.core.errors import PacelineError
from paceline.core.results import EvalResult, RunResult, StragglerResult
from paceline.core.stages import OTHER, display_name
from paceline.core.watch_result import WatchResult, is_watch_dir, read_watch_result
from paceline.report.compare_model import ComparedRun, read_compared_run

Kind = Literal["watched script", "run"]
_VERSIONS: Final = ("python", "torchvision", "numpy", "pillow", "cuda", "nccl", "driver")
_COUNTED: Final = ("evaluate", "checkpoint")
"""Pauses whose number per step is a setting of the script, though it may have no name."""


@dataclass(frozen=True)
class Side:
    """One of two runs.

    `settings` are all recorded facts as text by dotted name. `stages` and `pauses` are seconds per step of rank 0, and
    `blocks` the mean seconds of steps, block by block after the measurement warm-up. `samples` are those of all ranks
    per step. `lost_share` is the share of time that other processes took. `losses` are by step from 1 without gaps,
    and empty if some were not recorded. `last_losses` are the latest. `evaluation` is the last one.
    """

    path: Path
    kind: Kind
    settings: Mapping[str, str]
    steps: int
    stages: Mapping[str, float]
    pauses: Mapping[str, float]
    blocks: Sequence[float] = ()
    samples: float | None = None
    lost_share: float | None = None
    losses: Mapping[int, float] = field(default_factory=dict)
    last_losses: Sequence[float] = ()
    evaluation: EvalResult | None = None

    @property
    def step_s(self) -> float:
        """Seconds per step with pauses."""
        return fsum((*self.stages.values(), *self.pauses.values()))


def read_side(path: Path) -> Side:
    """Read the folder `path`. Raise `PacelineError` if it is of no run, or of one that has not ended."""
    return _of_watched(path, read_watch_result(path)) if is_watch_dir(path) else _of_run(path)


def _of_watched(path: Path, result: WatchResult) -> Side:
    if not result.measured_steps:
        raise PacelineError(f"{path}: has no measured step: {result.verdict['evidence']} (name another)")
    number = result.measured_steps
    stages = {name: each.device_s / number for name, each in result.stages.items()}
    stages[OTHER] = stages.get(OTHER, 0.0) + max(0.0, result.step_s - fsum(stages.values()))
    counts = {
        f"pauses.{name}": f"{1000 * result.num_pauses[name] / result.steps:.0f} per 1,000 steps"
        for name in _COUNTED
        if result.num_pauses.get(name)
    }
    first = dict(enumerate(result.first_losses, 1))
    # A point is a mean over the steps since the one before it: none of them may belong to the warm-up.
    before = [0, *(each.step for each in result.curve)]
    after = [each.step_s for last, each in zip(before, result.curve, strict=False) if last >= result.warmup_steps]
    return Side(
        path=path,
        kind="watched script",
        settings={
            **result.setup,
            "ranks": str(result.world_size),
            "steps": str(result.steps),
            **({"framework": result.framework} if result.framework else {}),
            **counts,
            **_describe_straggler(result.straggler),
        },
        steps=result.steps,
        stages=stages,
        pauses={name: each_s / result.steps for name, each_s in result.pauses.items()},
        blocks=after,
        samples=None if result.samples_per_s is None else result.samples_per_s * result.step_s,
        lost_share=None if result.cpu is None else result.cpu.share,
        losses=first,
        last_losses=result.last_losses,
    )


def _of_run(path: Path) -> Side:
    run = read_compared_run(path, "top1")
    result = run.result
    if result is None:
        raise PacelineError(f"{path}: has no result: the run has not ended, or result.json is damaged (name another)")
    if not run.settings:
        raise PacelineError(f"{path}: its recipe cannot be read: {'; '.join(run.problems)} (name another)")
    if not result.throughput.n or not result.steps:
        raise PacelineError(f"{path}: has no measured step (name a longer run, or lower measure.warmup_steps)")
    samples = result.images_seen / result.steps
    stages, pauses = _times_of_run(result, samples)
    points = run.steps.points
    warmup = _warmup_steps(run)
    rates = [each["images_per_s"] for each in points if each.get("step", 0) > warmup and each.get("images_per_s")]
    losses = {int(each["step"]): each["loss"] for each in points if "step" in each and "loss" in each}
    # A mean over several steps may differ where no step is the first to do so.
    has_every_step = list(losses) == list(range(1, len(losses) + 1))
    return Side(
        path=path,
        kind="run",
        settings=_settings_of_run(run, result),
        steps=result.steps,
        stages=stages,
        pauses=pauses,
        blocks=[samples / each for each in rates if each > 0],
        samples=samples,
        lost_share=None if result.cpu is None else result.cpu.share,
        losses=losses if has_every_step else {},
        last_losses=list(losses.values())[-max(1, len(losses) // 4) :],
        evaluation=result.ema or result.eval,
    )


def _times_of_run(result: RunResult, samples: float) -> tuple[dict[str, float], dict[str, float]]:
    account = result.account
    whole_s = samples / result.throughput.images_per_s
    if account is None or not account.counted_steps:
        return {OTHER: whole_s}, {}
    stages = {name: each.device_s / account.counted_steps for name, each in result.stages.items()}
    stages[OTHER] = stages.get(OTHER, 0.0) + max(0.0, whole_s - fsum(stages.values()))
    return stages, {name: each_s / result.steps for name, each_s in account.pauses.items()}


def _warmup_steps(run: ComparedRun) -> int:
    text = run.settings.get("measure.warmup_steps", "")
    return int(text) if text.isdecimal() else 0


def _settings_of_run(run: ComparedRun, result: RunResult) -> dict[str, str]:
    found = result.provenance
    versions = {f"version.{name}": str(found[name]) for name in _VERSIONS if found.get(name)}
    machine = {f"machine.{name}": value for name, value in run.hardware.items() if name != "ranks"}
    seed = {"seed": str(run.seed)} if run.seed is not None else {}
    threads = {"threads": str(found["threads"])} if found.get("threads") else {}
    return {**run.settings, **seed, **versions, **machine, **threads, **_describe_straggler(result.straggler)}


def _describe_straggler(straggler: StragglerResult | None) -> dict[str, str]:
    if straggler is None or straggler.rank is None:
        return {}
    stage = display_name(straggler.stage) if straggler.stage else "no single stage"
    return {"straggler": f"rank {straggler.rank}, late in {stage}"}


def final_metric(a: Side, b: Side) -> tuple[str, float, float] | None:
    """Return the metric by which both ended and its values: top-1 accuracy, else a loss; None if neither has one."""
    ours, theirs = a.evaluation, b.evaluation
    if ours is not None and theirs is not None:
        name = "loss" if isnan(ours.top1) or isnan(theirs.top1) else "top1"
        return name, getattr(ours, name), getattr(theirs, name)
    if a.last_losses and b.last_losses:
        return "loss", fsum(a.last_losses) / len(a.last_losses), fsum(b.last_losses) / len(b.last_losses)
    return None
