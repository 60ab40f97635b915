"""Train from a recipe and a world: `run` connects the ranks and reads data, `_train` builds and runs the trainer."""

import contextlib
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from paceline.core.dataset import Source
from paceline.core.errors import CheckpointError, PacelineError
from paceline.core.health import is_suspicious
from paceline.core.results import FINISHED, CheckpointResult, EvalReport, RunResult, Status
from paceline.core.run_dir import RunDir, run_lock
from paceline.core.stages import FINISH
from paceline.core.world import World
from paceline.measure.machine import describe_machine
from paceline.measure.throughput import RunTimer, unix_s
from paceline.measure.timer import StageTimer, now_s
from paceline.parallel.binding import bind_rank
from paceline.parallel.consensus import build_consensus
from paceline.parallel.process_group import RankStore, rendezvous
from paceline.parallel.watchdog import watchdog
from paceline.recipe.plan import read_batch, resolve_batch, small_batch_warning, smallest_batch, write_batch
from paceline.recipe.plugins import check_plugins, code_identity
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.train import CrossEntropyLoss, Train
from paceline.training.batch_fit import fit_batch
from paceline.training.checkpoint import model_tensors
from paceline.training.components import build_run_deadline, build_trainer, prepare_model
from paceline.training.context import RunContext, open_context
from paceline.training.coordinator import NUM_FLAGS
from paceline.training.datasets import read_run_data
from paceline.training.eval_outputs import save_worst_images, write_predictions
from paceline.training.explain import ExplainMistakes, build_mistake_explainer, explain_or_warn
from paceline.training.logging.build import require_sinks
from paceline.training.measurements import build_run_meter
from paceline.training.out_of_memory import explain_others
from paceline.training.outputs import build_run_outputs, collect_energy, find_resume_checkpoint, start_telemetry
from paceline.training.precision import check_trained_model
from paceline.training.process import Invocation, RunProcess
from paceline.training.quote_truth import compare_with_quote, read_quote
from paceline.training.result import FinalWeights, StartupTimes, build_result, collect_evidence, diagnose_run
from paceline.training.resume import (
    check_rundir,
    describe_unsaved_weights,
    keep_batch,
    list_changed_plugins,
    read_final_result,
    read_measured_batch,
    was_started_by,
)
from paceline.training.run_timing import add_timing
from paceline.training.saver import require_optimizer_state

_NO_CHECKPOINTS: Final = CheckpointResult(saved=0, failed=0, stall_s=0.0, write_s=0.0, bytes=0)


def run(recipe: Recipe, world: World, rundir: RunDir, *, resume: bool = False, invocation: Invocation) -> RunResult:
    """Train `recipe` as one rank of `world`, and return the result. All ranks use rank 0's `rundir`.

    With `resume`, or after the launcher restarted the ranks, continue from the newest intact checkpoint, if any; of a
    finished run, return the result. A stop signal ends the run with a checkpoint and status `preempted`. Raise
    `PacelineError` for errors that the user can fix.
    """
    requested = recipe
    with (
        invocation.interrupts as interrupts,
        rendezvous(world, recipe.parallel) as store,
        contextlib.ExitStack() as exit_stack,
    ):
        # Rank 0 decides from the run directory and broadcasts: file systems may show ranks different states.
        changes: Sequence[str] = ()
        first_s = math.inf
        if world.is_main:
            lock = run_lock(
                rundir.path,
                world.launcher_pid,
                started_s=unix_s() - (now_s() - invocation.started_s),
                launch=invocation.launch,
                resume=resume,
            )
            first_s = exit_stack.enter_context(lock)
            resume = resume or (world.may_be_restarted and was_started_by(rundir, invocation.launch))
            recipe, notes = keep_batch(recipe, rundir, world.world_size) if resume else (recipe, [])
            recipe = resolve_batch(recipe, world.world_size)
            changes = [*notes, *check_rundir(rundir, recipe, resume=resume)]
        recipe = read_batch(recipe, store.broadcast("batch", write_batch(recipe)))
        rundir = RunDir(Path(store.broadcast("rundir", str(rundir.path))))
        resume = store.broadcast("resume", "yes" if resume else "") == "yes"
        finished = read_final_result(rundir, recipe.train.max_time) if resume and world.is_main else None
        result = store.broadcast("ended", finished.model_dump_json() if finished else "")
        if result:
            return RunResult.model_validate_json(result).of(rundir.path)

        progress = invocation.progress
        exit_stack.enter_context(watchdog(store, recipe.parallel, progress, interrupts, rundir.stacks(world.rank)))
        process = RunProcess(rundir, invocation, store, progress, first_s)
        check_plugins(recipe)
        if world.is_main:
            require_sinks(recipe.log)
            if not resume:
                read_quote(recipe.log, rundir)  # before the data, as it may be missing
        binding = bind_rank(recipe.parallel, world)
        smallest = smallest_batch(recipe, world.world_size)
        read = partial(read_run_data, smallest)
        progress.doing = "reading the dataset"
        trained = rundir if resume else None
        with open_context(smallest, store, read, world.world_size, progress.on_wait, trained) as context:
            progress.doing = "measuring the batch"
            context, measured = fit_batch(context, recipe, progress.on_wait)
            context = context.with_notes(binding.note)
            measured = measured or read_measured_batch(rundir)
            process = process.with_provenance({**measured, **binding.provenance})
            context = context.with_notes(small_batch_warning(requested.data, world.world_size, context.device.type))
            context = context.with_notes(*check_trained_model(recipe.model, recipe.train, context.plan, context.device))
            start_from = find_resume_checkpoint(context, process) if resume else ""
            if start_from and world.is_main:
                changes = [*changes, *list_changed_plugins(Path(start_from), code_identity(recipe))]
            with explain_others(context):
                return _train(context.with_notes(*changes), process, start_from=start_from).of(rundir.path)


def _train(context: RunContext, process: RunProcess, *, start_from: str) -> RunResult:
    """Train from the checkpoint `start_from`, or from the first step, and write the outputs of the run."""
    process.progress.doing = "building the model"
    context, prepared = prepare_model(context, process.store, start_from)
    training_state, state, world = prepared.training_state, prepared.state, context.world
    model, strategy, precision = training_state.model, training_state.strategy, training_state.precision
    machine = describe_machine()
    outputs = build_run_outputs(context, process, training_state, machine, state, prepared.initial_weights.provenance)
    context.loader_warnings.connect(outputs.sinks.warned)
    with contextlib.closing(outputs.sinks):  # which receive the result
        process.store.broadcast("opened", "yes")  # the other ranks write into the folder that rank 0 created
        process = replace(process, deadline=build_run_deadline(context, process, outputs))
        timer = RunTimer(state.trained_s, train_before_s=state.train_s)
        outputs, timing = add_timing(context, process, outputs, timer, state)
        process.progress.estimator = timing.estimator if timing else None
        with (
            contextlib.closing(outputs.writer) if outputs.writer else contextlib.nullcontext(),
            contextlib.closing(build_consensus(world, NUM_FLAGS, process.store.timeout)) as consensus,
            start_telemetry(context, process, strategy, outputs.sinks.warned) or contextlib.nullcontext() as telemetry,
        ):
            meter = build_run_meter(context, process.rundir, training_state, outputs.sinks.warned)
            trainer = build_trainer(context, process, prepared, outputs, consensus, timer, meter)
            if start_from and not trainer.is_at_end(state):
                require_optimizer_state(Path(start_from))
            process.progress.read_progress = lambda: (state.step, trainer.clock.current_stage)
            status = trainer.fit(state)
            process.progress.read_progress = lambda: (state.step, FINISH)
            status = _broadcast_status(status, process.store)
            if status == "preempted":
                process.store.broadcast("saved", "yes")  # a launcher may kill all ranks once one exits with code 75
            finish_timer = StageTimer()
            with finish_timer.turn():
                measured = meter.collect()
                weights = FinalWeights.from_model(model, strategy.gather(model_tensors(model)))
                evidence = collect_evidence(state, status, context.plan.steps_per_epoch, precision)
                evidence = replace(evidence, has_cross_entropy=_has_cross_entropy(context.recipe.train))
                check = None
                if status != "preempted" and is_suspicious(evidence):  # a preempted run has no time
                    check = context.check_batch_norm(precision, strategy, training_state.average, model)

        energy = collect_energy(context, telemetry, strategy, state.images_seen)
        result = build_result(
            context,
            state,
            weights,
            measured,
            timer,
            timing,
            status=status,
            startup=StartupTimes(
                timer.started_s - process.invocation.started_s, prepared.compile_s, finish_timer.total_s
            ),
            goodput=outputs.goodput,
            checkpoints=outputs.writer.result() if outputs.writer else _NO_CHECKPOINTS,
            health=diagnose_run(evidence, process.rundir, check) if world.is_main else None,
            energy=energy,
            provenance={
                **machine,
                "device": context.device.type,
                "launcher": world.launcher,
                "command": process.invocation.command,
                **process.invocation.provenance,
                **outputs.provenance,
                **_stop_signal(status, process),
                **({"telemetry_missing": telemetry.missing} if telemetry and telemetry.missing else {}),
            },
        )
        if outputs.quote is not None and outputs.goodput is not None:
            first_s = outputs.goodput.first_startup_s
            truth = compare_with_quote(outputs.quote, context.recipe, context.plan, result, first_s)
            result = result.model_copy(update={"quote": truth})
        if outputs.goodput is not None:
            outputs.goodput.end(state.step, timer.elapsed_s, status)
        if world.is_main:
            # Before the result, which says that the run is complete.
            _write_predictions(process, status, state.last, context.datasets.val)
            _write_result(result, process)
            outputs.sinks.finished(result)
            if measured.clock_offsets_s:
                meter.merge_traces(measured.clock_offsets_s)
            is_sharded = context.recipe.parallel.strategy == "fsdp" and world.world_size > 1
            average, trained_s = training_state.average, state.trained_s
            explain = build_mistake_explainer(context, model, precision, average, trained_s, is_sharded=is_sharded)
            _write_worst_images(process, state.last, context.datasets.val, explain)
    return result


def _has_cross_entropy(train: Train) -> bool:
    return train.loss == CrossEntropyLoss() and train.distill == "off"


def _broadcast_status(status: Status, store: RankStore) -> Status:
    """Return the final status on rank 0: only the rank that saves knows of a failure."""
    return "failed" if store.broadcast("unsaved", "yes" if status == "failed" else "") else status


def _stop_signal(status: Status, process: RunProcess) -> dict[str, str]:
    """Return the stop signal of a preempted run, if this rank received it."""
    requested = process.invocation.interrupts.requested
    return {"stopped_by": requested} if status == "preempted" and requested else {}


def _write_result(result: RunResult, process: RunProcess) -> None:
    """Write `result.json`. Raise `CheckpointError` if the final weights could not be saved either."""
    try:
        process.rundir.write_result(result)
    except PacelineError as error:
        if result.status == "failed":
            raise CheckpointError(f"{describe_unsaved_weights(process.rundir, result)}; {error}") from None
        raise


def _write_predictions(process: RunProcess, status: Status, report: EvalReport | None, source: Source) -> None:
    """Write the predictions of the last evaluation of a complete run, if it has listed them; a failure is a warning."""
    if status not in FINISHED or report is None or not report.predictions:  # a restored evaluation has none
        return
    try:
        write_predictions(process.rundir.predictions, report.predictions, source)
    except PacelineError as error:
        process.warn(str(error))


def _write_worst_images(
    process: RunProcess, report: EvalReport | None, source: Source, explain: ExplainMistakes
) -> None:
    """Write the worst images of the last evaluation; failures are warnings."""
    if report is None or not report.classes:  # a restored evaluation has no images
        return
    worst = process.rundir.worst
    try:
        save_worst_images(worst, report.worst, source, overlays=explain_or_warn(explain, report.worst, process.warn))
    except Exception as error:  # a user's own data source may raise anything
        process.warn(f"{worst}: was not written: {type(error).__name__}: {error} (train without log.worst)")
