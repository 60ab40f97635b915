"""From what a run measured to its result."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from torch import Tensor

from paceline.core.results import CheckpointResult, RunResult, StageResult, Status, ThroughputResult, TimeResult
from paceline.measure import ClockSummary
from paceline.measure.rate import Stopwatch
from paceline.measure.throughput import throughput
from paceline.measure.verdict import verdict
from paceline.parallel.device import usable_cores
from paceline.train.attempts import Ledger
from paceline.train.checkpoint import weights_sha256
from paceline.train.parts import Parts
from paceline.train.state import TrainState


def summarise(
    parts: Parts,
    state: TrainState,
    weights: Mapping[str, Tensor],
    summary: ClockSummary,
    watch: Stopwatch,
    *,
    status: Status,
    startup_s: float,
    ledger: Ledger,
    checkpoints: CheckpointResult,
    provenance: dict[str, Any],
) -> RunResult:
    """Return the result of the run that ended in `state`. Times are of this process, seconds throughout; `goodput` is
    of all processes that `ledger` knows of.

    `weights` are the model's parameters and buffers by name, whole (`Strategy.gather`); `checkpoints` is what saving
    has come to. Call it when everything is saved.
    """
    recipe, plan, last = parts.recipe, parts.plan, state.last
    rates = throughput(summary.step_s, plan.batch_size, summary.excluded_s)
    eval_every = None if recipe.train.eval_every == "off" else recipe.train.eval_every
    cores = max(1, usable_cores() // parts.world.local_world_size)
    pauses = summary.pauses
    eval_s, checkpoint_s = pauses.get("evaluate", 0.0), pauses.get("checkpoint", 0.0)
    return RunResult(
        status=status,
        recipe_hash=recipe.hash,
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
        throughput=ThroughputResult(**asdict(rates)),
        time=TimeResult(
            wall_s=startup_s + watch.here_s,
            startup_s=startup_s,
            train_s=watch.here_s - eval_s - checkpoint_s,
            eval_s=eval_s,
            checkpoint_s=checkpoint_s,
            to_target_s=state.target_s,
        ),
        goodput=ledger.goodput(watch.elapsed_s, summary),
        checkpoints=checkpoints,
        stages={name: StageResult(**asdict(total)) for name, total in summary.stages.items()},
        verdict=verdict(summary, workers=parts.workers, cores=cores, eval_every=eval_every).to_dict(),
        lr=plan.lr_sentence,
        weights_sha256=weights_sha256(weights),
        provenance=provenance,
    )
