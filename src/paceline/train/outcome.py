"""Build `RunResult` from the run's measurements."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import fsum
from typing import Any, Self

from torch import Tensor, nn

from paceline.core.dataset import ArraySource
from paceline.core.limits import rank_cores
from paceline.core.results import (
    AccountResult,
    CheckpointResult,
    Finding,
    RunResult,
    StageResult,
    Status,
    ThroughputResult,
    TimeResult,
)
from paceline.core.stages import STAGES
from paceline.data.pack.reader import PackSource
from paceline.measure import ClockSummary
from paceline.measure.rate import RunTimer
from paceline.measure.throughput import throughput
from paceline.measure.verdict import BottleneckResult, RunSettings, find_bottleneck
from paceline.train.attempts import GoodputTracker
from paceline.train.checkpoint import weights_sha256
from paceline.train.meter import Measurements
from paceline.train.parts import RunContext
from paceline.train.state import TrainState


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
    watch: RunTimer,
    *,
    status: Status,
    startup: StartupTimes,
    goodput: GoodputTracker,
    checkpoints: CheckpointResult,
    health: tuple[Finding, ...] | None,
    provenance: dict[str, Any],
) -> RunResult:
    """Return the result of the run that ended in `state`. Call it after the last save.

    Times are seconds of this process; goodput covers all processes. `checkpoints` summarizes the saves, `health` holds
    the findings.
    """
    recipe, plan, last, summary = context.recipe, context.plan, state.last, measured.summary
    rates = throughput(summary.step_s, plan.batch_size, summary.excluded_s)
    times = _build_time_result(summary.pauses, state, watch, startup)
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
        throughput=ThroughputResult(**asdict(rates)),
        time=times,
        goodput=goodput.goodput(watch.elapsed_s, summary, startup.finish_s),
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
        verdict=_find_bottleneck(context, measured).to_dict(),
        lr=plan.lr_sentence,
        weights_sha256=weights.sha256,
        provenance=provenance,
    )


def _build_time_result(
    pauses: Mapping[str, float], state: TrainState, watch: RunTimer, startup: StartupTimes
) -> TimeResult:
    eval_s, checkpoint_s = pauses.get("evaluate", 0.0), pauses.get("checkpoint", 0.0)
    return TimeResult(
        wall_s=startup.startup_s + watch.process_elapsed_s,
        startup_s=startup.startup_s,
        train_s=watch.process_elapsed_s - eval_s - checkpoint_s - startup.finish_s,
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
    """Return the bottleneck of the run."""
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
        accumulate=train.accumulate,
        threads=parallel.threads,
    )
    return find_bottleneck(
        measured.summary,
        settings,
        straggler=measured.straggler,
        communication=measured.communication,
        cpu=measured.cpu,
    )
