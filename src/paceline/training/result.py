"""Build the `RunResult` and its health findings from the measurements of a run."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import islice
from math import fsum
from pathlib import Path
from typing import Any, Final, Self

from torch import Tensor, nn

from paceline.core.dataset import ArraySource
from paceline.core.errors import PacelineError
from paceline.core.health import EvalPoint, RunHistory, eval_points, find_problems, training_losses
from paceline.core.host import rank_cores
from paceline.core.results import (
    AccountResult,
    BatchNormCheck,
    CheckpointResult,
    EnergyResult,
    EvalReport,
    EvalResult,
    Finding,
    RunResult,
    StageResult,
    Status,
    ThroughputResult,
    TimeResult,
)
from paceline.core.run_dir import RunDir, checkpoint_name, read_lines
from paceline.core.stages import STAGES
from paceline.data.pack.reader import PackSource
from paceline.measure import ClockSummary
from paceline.measure.bottleneck import BottleneckResult, RunSettings, find_bottleneck
from paceline.measure.throughput import RunTimer, throughput
from paceline.recipe.schema.train import Log
from paceline.training.checkpoint import read_state, weights_sha256
from paceline.training.context import RunContext
from paceline.training.goodput import GoodputTracker
from paceline.training.measurements import Measurements
from paceline.training.precision import Precision
from paceline.training.run_timing import RunTiming
from paceline.training.scores import build_monitor
from paceline.training.state import TrainState

_MAX_RECORDS: Final = 1_000_000
"""Limit per file, which takes a few seconds at the end of a run."""


def collect_evidence(state: TrainState, status: Status, steps_per_epoch: int, precision: Precision) -> RunHistory:
    """Return the evidence that is the same on every rank at the end of a run."""
    last = state.last
    # The findings are about one label per image.
    last = None if last is None or math.isnan(last.val.top1) else last
    points = (EvalPoint.of(last, state.last_step, state.last_step / steps_per_epoch),) if last else ()
    return replace(
        _class_tables(last) if last else RunHistory(()),
        points=points,
        status=status,
        steps=state.step,
        skipped=state.skipped,
        scales_loss=precision.scaler is not None,
        best=state.best,
        best_step=state.best_step if state.best else None,
    )


def evidence_from_report(report: EvalReport) -> RunHistory:
    """Return the evidence of a stand-alone evaluation."""
    if math.isnan(report.val.top1):
        return RunHistory((), is_alone=True)
    return replace(_class_tables(report), points=(EvalPoint.of(report),), is_alone=True)


def read_best_evaluation(checkpoint: Path) -> tuple[EvalResult | None, int | None]:
    """Return the best evaluation up to `checkpoint` and its step, or (None, None) for another version's checkpoint.

    Raise `CheckpointError` for a damaged one.
    """
    progress = read_state(checkpoint).get("train", {})
    try:
        best, step = EvalResult.model_validate(progress["best"]), int(progress["best_step"])
    except (LookupError, OverflowError, TypeError, ValueError):
        return None, None
    return (best, step) if 0 <= best.top1 <= 1 else (None, None)


def diagnose_run(known: RunHistory, rundir: RunDir, check: BatchNormCheck | None) -> tuple[Finding, ...]:
    """Return the findings on the run in `rundir`. Unreadable files are ignored."""
    best = known.best_step
    return find_problems(
        replace(
            known,
            points=eval_points(_read_records(rundir.evals)) or known.points,
            losses=training_losses(_read_records(rundir.steps)),
            best_kept=None if best is None else (rundir.checkpoints / checkpoint_name(best)).is_dir(),
            batch_norm=check,
        )
    )


def _class_tables(report: EvalReport) -> RunHistory:
    """Return the per-class tables as evidence. A restored evaluation has none."""
    table = report.classes
    return RunHistory((), classes=table.classes, confusion=table.confusion) if table else RunHistory(())


def _read_records(path: Path) -> Iterable[dict[str, Any]]:
    try:
        return list(islice(read_lines(path), _MAX_RECORDS))
    except (OSError, PacelineError):
        return ()


@dataclass(frozen=True)
class StartupTimes:
    """Seconds outside of training: up to the first step (`compile_s` of them compiling), and after the last."""

    startup_s: float
    compile_s: float
    finish_s: float


@dataclass(frozen=True)
class FinalWeights:
    """Final weights: number of parameters, number of trained ones, and SHA-256 of the saved tensors."""

    parameters: int
    trained: int
    sha256: str

    @classmethod
    def from_model(cls, model: nn.Module, tensors: Mapping[str, Tensor]) -> Self:
        """Return those of `model`; `tensors` are its whole, saved tensors."""
        sizes = [(each.numel(), each.requires_grad) for each in model.parameters()]
        trained = sum(size for size, is_trained in sizes if is_trained)
        return cls(sum(size for size, _ in sizes), trained, weights_sha256(tensors))


def build_result(
    context: RunContext,
    state: TrainState,
    weights: FinalWeights,
    measured: Measurements,
    timer: RunTimer,
    timing: RunTiming | None,
    *,
    status: Status,
    startup: StartupTimes,
    goodput: GoodputTracker | None,
    checkpoints: CheckpointResult,
    health: tuple[Finding, ...] | None,
    energy: EnergyResult | None,
    provenance: dict[str, Any],
) -> RunResult:
    """Return the result of the run that ended in `state`. Call it after the last save.

    Times are those of this process; goodput covers all processes.
    """
    recipe, plan, last, summary = context.recipe, context.plan, state.last, measured.summary
    rates = throughput(summary.step_s, plan.batch_size, summary.excluded_s)
    monitor = build_monitor(recipe, context.default_monitor)
    times = _build_time_result(summary.pauses, state, timer, startup)
    return RunResult(
        status=status,
        recipe_hash=recipe.hash,
        parameters=weights.parameters,
        trained_parameters=weights.trained,
        world_size=context.world.world_size,
        epochs=state.step / plan.steps_per_epoch,
        steps=state.step,
        images_seen=state.images_seen,
        skipped_steps=state.skipped,
        bad_images=len(state.bad_images),
        eval=last and last.val,
        ema=last and last.ema,
        train_eval=last and last.train,
        gap=last and last.gap,
        best=state.best,
        best_step=state.best_step if state.best else None,
        best_epoch=state.best_step / plan.steps_per_epoch if state.best else None,
        monitor=monitor.name,
        is_monitor_minimized=monitor.is_minimized,
        throughput=ThroughputResult(**asdict(rates)),
        time=times,
        estimate=timing.estimate(status) if timing else None,
        forecast=timing.forecast(status) if timing else None,
        goodput=goodput.goodput(timer.elapsed_s, summary, startup.finish_s) if goodput else None,
        checkpoints=checkpoints,
        stages={name: StageResult(**asdict(summary.stages[name])) for name in STAGES if name in summary.stages},
        account=attribute_wall_time(summary, times.wall_s, startup),
        memory=measured.memory,
        cpu=measured.cpu,
        loader=measured.loader,
        communication=measured.communication,
        host_to_device=measured.host_to_device,
        ranks=measured.ranks,
        straggler=measured.straggler,
        health=health,
        energy=energy,
        cost=_compute_cost(recipe.log, goodput),
        verdict=_find_bottleneck(context, measured).to_dict(),
        lr=plan.lr_sentence,
        weights_sha256=weights.sha256,
        provenance=provenance,
    )


def _compute_cost(log: Log, goodput: GoodputTracker | None) -> float | None:
    """Return the price of the rank-hours so far on rank 0; None without a price."""
    return None if log.price_per_hour == "off" or goodput is None else log.price_per_hour * goodput.rank_hours()


def _build_time_result(
    pauses: Mapping[str, float], state: TrainState, timer: RunTimer, startup: StartupTimes
) -> TimeResult:
    eval_s, checkpoint_s = pauses.get("evaluate", 0.0), pauses.get("checkpoint", 0.0)
    return TimeResult(
        wall_s=startup.startup_s + timer.process_elapsed_s,
        startup_s=startup.startup_s,
        train_s=timer.process_elapsed_s - eval_s - checkpoint_s - startup.finish_s,
        eval_s=eval_s,
        checkpoint_s=checkpoint_s,
        to_target_s=state.target_s,
    )


def attribute_wall_time(summary: ClockSummary, wall_s: float, startup: StartupTimes) -> AccountResult | None:
    """Attribute the `wall_s` seconds of this process to stages and pauses; None without a clock."""
    if not summary.has_run:
        return None
    stages_s = fsum(stage.host_s for stage in summary.stages.values())
    known_s = fsum([startup.startup_s, summary.warmup_s, stages_s, *summary.pauses.values(), startup.finish_s])
    residual_s = wall_s - known_s
    return AccountResult(
        wall_s=wall_s,
        start_up_s=startup.startup_s - startup.compile_s,
        compile_s=startup.compile_s,
        warmup_s=summary.warmup_s,
        stages_s=stages_s,
        counted_steps=summary.n,
        pauses=dict(summary.pauses),
        finish_s=startup.finish_s,
        residual_s=residual_s,
        explained=1 - abs(residual_s) / wall_s,
    )


def _find_bottleneck(context: RunContext, measured: Measurements) -> BottleneckResult:
    recipe, world = context.recipe, context.world
    train, parallel, saving = recipe.train, recipe.parallel, recipe.checkpoint
    settings = RunSettings(
        workers=context.loader_choice.workers,
        cores=rank_cores(world),
        eval_every=None if train.eval_every == "off" else train.eval_every,
        save_every=None if saving.every == "off" or saving.keep_every != "off" else saving.every,
        saves_in_background=saving.background == "on",
        augments_on=context.augment_location,
        has_files=not isinstance(context.datasets.train, ArraySource | PackSource),
        device_type=context.device.type,
        world_size=world.world_size,
        strategy=parallel.strategy,
        precision=train.precision,
        compile=train.compile,
        compression=parallel.compression if parallel.sync_gradients else None,
        accumulate=train.num_micro_batches,
        threads=parallel.threads,
    )
    return find_bottleneck(
        measured.summary,
        settings,
        straggler=measured.straggler,
        communication=measured.communication,
        cpu=measured.cpu,
    )
