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
from paceline.measure.rate import Stopwatch
from paceline.measure.throughput import throughput
from paceline.measure.verdict import Settings, Verdict, verdict
from paceline.train.attempts import Ledger
from paceline.train.checkpoint import weights_sha256
from paceline.train.meter import Measured
from paceline.train.parts import Parts
from paceline.train.state import TrainState


@dataclass(frozen=True)
class Around:
    """Seconds outside of training: up to the first step (`compile_s` of them compiling), and after the last."""

    startup_s: float
    compile_s: float
    finish_s: float


@dataclass(frozen=True)
class Weights:
    """Final weights: number of parameters, number of trained ones, and SHA-256 of the saved tensors."""

    parameters: int
    trained: int
    sha256: str

    @classmethod
    def of(cls, model: nn.Module, tensors: Mapping[str, Tensor]) -> Self:
        """Return those of `model`; `tensors` are its whole, saved tensors."""
        sizes = [(each.numel(), each.requires_grad) for each in model.parameters()]
        trained = sum(size for size, is_trained in sizes if is_trained)
        return cls(sum(size for size, _ in sizes), trained, weights_sha256(tensors))


def summarise(
    parts: Parts,
    state: TrainState,
    weights: Weights,
    measured: Measured,
    watch: Stopwatch,
    *,
    status: Status,
    around: Around,
    ledger: Ledger,
    checkpoints: CheckpointResult,
    health: tuple[Finding, ...] | None,
    provenance: dict[str, Any],
) -> RunResult:
    """Return the result of the run that ended in `state`. Call it after the last save.

    Times are seconds of this process; goodput covers all processes. `checkpoints` summarizes the saves, `health` holds
    the findings.
    """
    recipe, plan, last, summary = parts.recipe, parts.plan, state.last, measured.summary
    rates = throughput(summary.step_s, plan.batch_size, summary.excluded_s)
    times = _times(summary.pauses, state, watch, around)
    return RunResult(
        status=status,
        recipe_hash=recipe.hash,
        parameters=weights.parameters,
        trained_parameters=weights.trained,
        world_size=parts.world.world_size,
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
        goodput=ledger.goodput(watch.elapsed_s, summary, around.finish_s),
        checkpoints=checkpoints,
        stages={name: StageResult(**asdict(summary.stages[name])) for name in STAGES if name in summary.stages},
        account=account(summary, times.wall_s, around),
        memory=measured.memory,
        cpu=measured.cpu,
        loader=measured.loader,
        communication=measured.communication,
        host_to_device=measured.host_to_device,
        ranks=measured.ranks,
        straggler=measured.straggler,
        health=health,
        verdict=_verdict(parts, measured).to_dict(),
        lr=plan.lr_sentence,
        weights_sha256=weights.sha256,
        provenance=provenance,
    )


def _times(pauses: Mapping[str, float], state: TrainState, watch: Stopwatch, around: Around) -> TimeResult:
    eval_s, checkpoint_s = pauses.get("evaluate", 0.0), pauses.get("checkpoint", 0.0)
    return TimeResult(
        wall_s=around.startup_s + watch.here_s,
        startup_s=around.startup_s,
        train_s=watch.here_s - eval_s - checkpoint_s - around.finish_s,
        eval_s=eval_s,
        checkpoint_s=checkpoint_s,
        to_target_s=state.target_s,
    )


def account(summary: ClockSummary, wall_s: float, around: Around) -> AccountResult | None:
    """Attribute the `wall_s` seconds of this process to stages and pauses; None without a clock."""
    if not summary.has_run:
        return None
    stages_s = fsum(stage.host_s for stage in summary.stages.values())
    known_s = fsum([around.startup_s, summary.warmup_s, stages_s, *summary.pauses.values(), around.finish_s])
    residual_s = wall_s - known_s
    return AccountResult(
        wall_s=wall_s,
        start_up_s=around.startup_s - around.compile_s,
        compile_s=around.compile_s,
        warmup_s=summary.warmup_s,
        stages_s=stages_s,
        counted_steps=summary.n,
        pauses=dict(summary.pauses),
        finish_s=around.finish_s,
        residual_s=residual_s,
        explained=1 - abs(residual_s) / wall_s,
    )


def _verdict(parts: Parts, measured: Measured) -> Verdict:
    """Return the bottleneck of the run."""
    recipe, world = parts.recipe, parts.world
    train, parallel, saving = recipe.train, recipe.parallel, recipe.checkpoint
    settings = Settings(
        workers=parts.choice.workers,
        cores=rank_cores(world),
        eval_every=None if train.eval_every == "off" else train.eval_every,
        save_every=None if saving.every == "off" or saving.keep_every != "off" else saving.every,
        saves_in_background=saving.background == "on",
        augments_on=parts.augments_on,
        has_files=not isinstance(parts.datasets.train, ArraySource | PackSource),
        device_type=parts.device.type,
        world_size=world.world_size,
        strategy=parallel.strategy,
        precision=train.precision,
        compile=train.compile,
        compression=parallel.compression if parallel.sync_gradients else None,
        accumulate=train.accumulate,
        threads=parallel.threads,
    )
    return verdict(
        measured.summary,
        settings,
        straggler=measured.straggler,
        communication=measured.communication,
        cpu=measured.cpu,
    )
