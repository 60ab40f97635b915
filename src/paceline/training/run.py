"""Compose and run a training or an evaluation from a recipe and a world. Read `run` from top to bottom."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from torch import nn

from paceline.core.dataset import Source
from paceline.core.errors import CheckpointError, DataError, PacelineError
from paceline.core.health import find_problems, is_suspicious
from paceline.core.results import EvalReport, RunResult, Status
from paceline.core.run_dir import RunDir
from paceline.core.stages import FINISH
from paceline.core.world import World
from paceline.data.sources.fingerprint import digest_datasets
from paceline.measure.machine import describe_machine
from paceline.measure.profiler import require_nvtx
from paceline.measure.throughput import IntervalTimer, RunTimer, unix_s
from paceline.measure.timer import StageTimer, now_s
from paceline.models.validate import check_model
from paceline.parallel.base import choose_device, generators, set_threads
from paceline.parallel.consensus import Consensus, build_consensus, build_replica_check
from paceline.parallel.process_group import RankStore, local_rank_zero_first, process_group, rendezvous
from paceline.parallel.strategy import Strategy, build_strategy
from paceline.parallel.watchdog import watchdog
from paceline.recipe.plan import resolve_batch, small_batch_warning, with_batch_size
from paceline.recipe.plugins import check_plugins, plugins_of
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.train import Parallel
from paceline.training.checkpoint import load_model, model_tensors
from paceline.training.compile import compile_model, warmup_pass
from paceline.training.context import RunContext
from paceline.training.coordinator import BadImageRegistry, StepCoordinator
from paceline.training.cuda_graphs import GraphPool, build_train_step, choose_graph_pool
from paceline.training.datasets import ReadData, discard_message, read_eval_data, read_run_data
from paceline.training.ema import build_weight_average
from paceline.training.eval_model import load_weight_average
from paceline.training.eval_outputs import discard, save_worst_images
from paceline.training.init_weights import (
    InitialWeights,
    find_initial_checkpoint,
    load_initial_weights,
    restored_origin,
)
from paceline.training.logging.base import build_sample_trace
from paceline.training.logging.build import require_sinks
from paceline.training.loss import CrossEntropy, build_loss
from paceline.training.lr_schedule import build_lr_schedule
from paceline.training.measurements import Measurements, RunMeter, build_run_meter
from paceline.training.metrics_logger import BatchAccuracy, MetricsLogger, build_batch_accuracy
from paceline.training.nonfinite import GradientProbe, NonFiniteReporter, build_buffer_rollback, build_nonfinite_guard
from paceline.training.optim.build import build_optimizer, describe_layer_decay, layers_for_decay
from paceline.training.optim.extra_state import build_extra_state
from paceline.training.outputs import RunOutputs, build_run_outputs, checkpoint_storage, start_telemetry
from paceline.training.precision import Precision, check_trained_model
from paceline.training.preemption import Deadline, build_deadline
from paceline.training.process import Invocation, RunProcess
from paceline.training.result import (
    FinalWeights,
    StartupTimes,
    build_result,
    collect_evidence,
    diagnose_run,
    evidence_from_report,
    read_best_evaluation,
)
from paceline.training.resume import (
    check_dataset,
    check_rundir,
    describe_missing_checkpoint,
    describe_unsaved_weights,
    keep_batch_size,
    list_changed_plugins,
    read_final_result,
    was_started_by,
)
from paceline.training.saver import CheckpointSaver, TrainingState
from paceline.training.state import StepInterval, TrainState, build_stop_rule
from paceline.training.trainer import EagerStep, OptimizerUpdate, StepSeeder, Trainer


def run(recipe: Recipe, world: World, rundir: RunDir, *, resume: bool = False, invocation: Invocation) -> RunResult:
    """Train `recipe` as one rank of `world`, and return the result. All ranks use rank 0's `rundir`.

    With `resume`, or after the launcher restarted the ranks, the run continues from its newest intact checkpoint, or
    starts if there is none; a finished run is returned as is. A stop signal ends the run early, with a checkpoint and
    status `preempted`. Raise `PacelineError` for errors that the user can fix.
    """
    requested = recipe
    with (
        invocation.interrupts as interrupts,
        rendezvous(world, recipe.parallel) as met,
        contextlib.ExitStack() as exit_stack,
    ):
        changes: Sequence[str] = ()
        first_s = math.inf
        if world.is_main:
            lock = rundir.lock(
                world.launcher_pid,
                started_s=unix_s() - (now_s() - invocation.started_s),
                launch=invocation.launch,
                resume=resume,
            )
            first_s = exit_stack.enter_context(lock)
            resume = resume or (world.may_be_again and was_started_by(rundir, invocation.launch))
            recipe, notes = keep_batch_size(recipe, rundir, world.world_size) if resume else (recipe, [])
            recipe = resolve_batch(recipe, world.world_size)
            changes = [*notes, *check_rundir(rundir, recipe, resume=resume)]
        recipe = with_batch_size(recipe, int(met.broadcast("batch_size", str(recipe.data.batch_size))))
        rundir = RunDir(Path(met.broadcast("rundir", str(rundir.path))))
        resume = met.broadcast("resume", "yes" if resume else "") == "yes"
        ended = read_final_result(rundir) if resume and world.is_main else None
        result = met.broadcast("ended", ended.model_dump_json() if ended else "")
        if result:
            return RunResult.model_validate_json(result).of(rundir.path)
        whereabouts = invocation.progress
        exit_stack.enter_context(watchdog(met, recipe.parallel, whereabouts, interrupts, rundir.stacks(world.rank)))
        job = RunProcess(rundir, invocation, met, whereabouts, first_s)
        check_plugins(recipe)
        if world.is_main:
            require_sinks(recipe.log)
        with _build_context(
            recipe, met, partial(read_run_data, recipe), world.world_size, whereabouts.on_wait
        ) as parts:
            parts = parts.with_notes(small_batch_warning(requested, world.world_size, parts.device.type))
            parts = parts.with_notes(*check_trained_model(recipe, parts.plan, parts.device))
            start_from = _find_resume_checkpoint(parts, job) if resume else ""
            if start_from and world.is_main:
                changes = [*changes, *list_changed_plugins(Path(start_from), recipe)]
            return _train(parts.with_notes(*changes), job, start_from=start_from).of(rundir.path)


def evaluate(
    recipe: Recipe,
    world: World,
    checkpoint: Path,
    *,
    run_recipe: Recipe,
    print_line: Callable[[str], None],
    write_report: Callable[[EvalReport, Source], None] = discard,
) -> EvalReport:
    """Evaluate the raw and averaged weights of `checkpoint` on the data of `recipe`, as one rank of `world`.

    `run_recipe` is the recipe of the checkpoint's run. If `recipe` names another dataset, classes are matched by name,
    and rank 0 reports this through `print_line`. `write_report` receives the report and the dataset while it can be
    read. Only the model and the dataset of `recipe` are imported; the caller has checked that the user allows their
    code.
    """
    read = partial(read_eval_data, recipe, run_recipe, checkpoint, print_line if world.is_main else discard_message)
    with rendezvous(world, recipe.parallel) as met, contextlib.ExitStack() as exit_stack:
        for plugin in plugins_of(recipe):
            if plugin.path in ("model", "data.source"):
                plugin.load()
        parts = exit_stack.enter_context(_build_context(recipe, met, read, train_ranks=1))
        if not parts.plan.val_images:
            raise DataError("data.source: there are no validation images to evaluate on (name some by data.source.*)")
        check_model(recipe.model, parts.plan)
        # The plan is for one rank: the training batch size may not divide over the ranks that evaluate.
        if recipe.data.eval_batch_size == "auto":
            eval_batch = -(-parts.plan.eval_batch // world.world_size)
            parts = replace(parts, plan=replace(parts.plan, eval_batch=eval_batch))
        precision = parts.create_precision()
        model = parts.create_model(precision, is_new=False)
        load_model(checkpoint, model)
        strategy = build_strategy(
            Parallel(), world, parts.device
        )  # the weights are whole, whichever strategy trained them
        average = load_weight_average(recipe, model, precision, checkpoint)
        report = parts.create_evaluator(precision, strategy, average)(model)
        assert report is not None, "a stand-alone evaluation is never preempted"
        evidence = evidence_from_report(report)
        if (
            recipe.data.source == run_recipe.data.source
        ):  # another dataset has no training images and no best evaluation
            best, best_step = read_best_evaluation(checkpoint)
            if is_suspicious(replace(evidence, best=best, best_step=best_step)):
                check = parts.check_batch_norm(precision, strategy, average, model)
                evidence = replace(evidence, batch_norm=check)
        report = report.model_copy(update={"health": find_problems(evidence)})
        if world.is_main:
            write_report(report, parts.datasets.val)
        return report


@contextlib.contextmanager
def _build_context(
    recipe: Recipe, store: RankStore, read: ReadData, train_ranks: int, on_wait: Callable[[], None] = lambda: None
) -> Iterator[RunContext]:
    """Choose the device, connect the ranks, `read` the data, and plan the training on `train_ranks` ranks.

    `on_wait` is called regularly while another rank reads the data.
    """
    world = store.world
    device = choose_device(recipe.parallel, world)
    set_threads(recipe.parallel, world)
    with process_group(store, recipe.parallel, device), contextlib.ExitStack() as exit_stack:
        recipe, datasets = local_rank_zero_first(store, partial(read, exit_stack), on_wait)
        parts = RunContext.derive(recipe, world, device, datasets, exit_stack, train_ranks)
        parts.check_worker_limits()
        yield parts


def _find_resume_checkpoint(context: RunContext, process: RunProcess) -> str:
    """Return the checkpoint to resume from, the same on every rank, or an empty string."""
    newest = None
    if context.world.is_main:
        checkpoints = checkpoint_storage(context, process.rundir)
        checkpoints.clean_up()
        newest = checkpoints.newest_intact(process.warn)
        if newest:
            check_dataset(newest, digest_datasets(context.datasets))
            if missing := describe_missing_checkpoint(process.rundir):
                process.warn(f"{missing}; the run is resumed from {newest.name}")
    return process.store.broadcast("start_from", str(newest or ""))


@dataclass(frozen=True)
class _PreparedModel:
    """A model that is ready to train, with everything that updates it.

    `graphs` captures its steps, or is None for eager steps. `initial_weights` describes the initial weights.
    """

    replica: nn.Module
    criterion: CrossEntropy
    training_state: TrainingState
    state: TrainState
    compile_s: float
    graphs: GraphPool | None
    initial_weights: InitialWeights


def _prepare_model(context: RunContext, store: RankStore, start_from: str) -> tuple[RunContext, _PreparedModel]:
    """Create the model or load it from the checkpoint `start_from`; return the context with more notes, and the model.

    Passes before the first step compile the model per image size, and let DDP order its buckets.
    """
    recipe, measure = context.recipe, context.recipe.measure
    if measure.nvtx != "off":
        require_nvtx()
    precision = context.create_precision()
    model = context.create_model(precision, is_new=not start_from)
    if start_from:
        load_model(Path(start_from), model)
        beginning = restored_origin(start_from)
    else:
        weights = find_initial_checkpoint(recipe.model.weights) if context.world.is_main else ""
        beginning = load_initial_weights(recipe.model, model, store.broadcast("weights", weights))
    now = now_s if measure.communication == "on" else None
    strategy = build_strategy(recipe.parallel, context.world, context.device, now, measure.warmup_steps)
    layers = layers_for_decay(recipe.optim, model)
    replica = compile_model(strategy.prepare(model), recipe.train.compile, len(context.plan.train_sizes))
    persistent = _create_training_state(context, model, precision, strategy, layers)
    criterion, weights_note = build_loss(recipe.train, context.datasets.train, context.device)
    state = persistent.load_state_dict(Path(start_from)) if start_from else TrainState()
    warm_up = partial(warmup_pass, model, replica, context.create_transfer(precision.dtype), precision, context.plan)
    compiling = StageTimer()
    if recipe.train.compile != "off":
        with compiling.turn():
            for first in (state.step, *(start for start, _ in context.plan.train_sizes if start > state.step)):
                warm_up(first)
    strategy.warm_up_buckets(partial(warm_up, state.step))
    comm_note = persistent.load_comm_state(Path(start_from)) if start_from else ""
    graphs, graphs_note = choose_graph_pool(recipe, context.world, context.device, persistent.optimizer)
    notes = (
        beginning.note,
        describe_layer_decay(recipe.optim, persistent.optimizer, layers),
        weights_note,
        comm_note,
        graphs_note,
    )
    return context.with_notes(*notes), _PreparedModel(
        replica, criterion, persistent, state, compiling.total_s, graphs, beginning
    )


def _train(context: RunContext, process: RunProcess, *, start_from: str) -> RunResult:
    context, ready = _prepare_model(context, process.store, start_from)
    recipe, world, persistent, state = context.recipe, context.world, ready.training_state, ready.state
    strategy = persistent.strategy
    machine = describe_machine()
    books = build_run_outputs(
        context, process, persistent, machine, state, ready.initial_weights.provenance
    )  # from here on a failure must close the sinks
    with contextlib.ExitStack() as on_error:
        on_error.callback(books.sinks.close)
        process.store.broadcast("opened", "yes")  # the other ranks write into the folder that rank 0 created
        process = replace(process, deadline=_create_deadline(context, process, books))
        watch = RunTimer(state.trained_s, train_before_s=state.train_s)
        accuracy = build_batch_accuracy(recipe.train.accuracy, context.plan.num_classes, context.device)
        trace = build_sample_trace(recipe.log, process.rundir, world.rank, state.step)
        journal = MetricsLogger(context.plan, strategy, persistent.schedule, books.sinks, trace, watch, accuracy, state)
        agreement = build_consensus(world, 3, process.store.timeout)
        on_error.pop_all()
    with contextlib.closing(journal):  # closes the sinks, which receive the result
        with (
            contextlib.closing(books.writer),
            contextlib.closing(agreement),
            start_telemetry(context, process, strategy, books.sinks.warned) as telemetry,
        ):
            loader = context.create_train_loader(context.create_transfer(persistent.precision.dtype))
            place = context.create_transfer(persistent.precision.dtype, timed=recipe.measure.clock == "on")
            meter = build_run_meter(context, process.rundir, strategy, loader, place, books.sinks.warned)
            trainer = _create_trainer(
                context, ready, _StepServices(journal, accuracy, agreement, meter), books, process
            )
            process.progress.read_progress = lambda: (state.step, trainer.clock.current_stage)
            status = trainer.fit(state)
            process.progress.read_progress = lambda: (state.step, FINISH)
            status = _broadcast_status(status, process.store)
            if status == "preempted":
                process.store.broadcast("saved", "yes")  # a launcher may kill all ranks once one exits with code 75
            finishing = StageTimer()
            with finishing.turn():
                measured = meter.collect()
                weights = FinalWeights.from_model(persistent.model, strategy.gather(model_tensors(persistent.model)))
                evidence = collect_evidence(state, status, context.plan.steps_per_epoch, persistent.precision)
                check = None
                if status != "preempted" and is_suspicious(evidence):  # a preempted run has no time
                    check = context.check_batch_norm(
                        persistent.precision, strategy, persistent.average, persistent.model
                    )

        result = build_result(
            context,
            state,
            weights,
            measured,
            watch,
            status=status,
            startup=StartupTimes(watch.started_s - process.invocation.started_s, ready.compile_s, finishing.total_s),
            goodput=books.goodput,
            checkpoints=books.writer.result(),
            health=diagnose_run(evidence, process.rundir, check) if world.is_main else None,
            provenance={
                **machine,
                "device": context.device.type,
                "launcher": world.launcher,
                "command": process.invocation.command,
                **process.invocation.provenance,
                **books.provenance,
                **_stop_signal(status, process),
                **({"telemetry_missing": telemetry.missing} if telemetry.missing else {}),
            },
        )
        books.goodput.end(state.step, watch.elapsed_s, status)
        if world.is_main:
            _write_result(result, process)
            books.sinks.finished(result)
            _write_images(context, process, meter, measured, state)
    return result


def _write_result(result: RunResult, process: RunProcess) -> None:
    """Write `result.json`. Raise `CheckpointError` if the final weights could not be saved either."""
    try:
        process.rundir.write_result(result)
    except PacelineError as error:
        if result.status == "failed":
            raise CheckpointError(f"{describe_unsaved_weights(process.rundir, result)}; {error}") from None
        raise


def _stop_signal(status: Status, process: RunProcess) -> dict[str, str]:
    """Return the stop signal of a preempted run, if this rank received it."""
    requested = process.invocation.interrupts.requested
    return {"stopped_by": requested} if status == "preempted" and requested else {}


def _broadcast_status(status: Status, store: RankStore) -> Status:
    """Return the final status as known to rank 0, the rank that saves."""
    return "failed" if store.broadcast("unsaved", "yes" if status == "failed" else "") else status


def _create_deadline(context: RunContext, process: RunProcess, outputs: RunOutputs) -> Deadline:
    """Return the deadline that stops the run before its batch job ends."""
    plan, invocation = context.plan, process.invocation
    return build_deadline(
        invocation.batch_job,
        context.world,
        StepInterval(plan.eval_every, plan.total_steps),
        lambda: outputs.writer.slowest_s,
        invocation.interrupts.request,
        process.warn,
        grace_s=context.recipe.checkpoint.grace.seconds,
    )


def _write_images(
    context: RunContext, process: RunProcess, meter: RunMeter, measured: Measurements, state: TrainState
) -> None:
    """Write the merged trace and the worst images. A finished run does not fail if this is impossible."""
    if measured.clock_offsets_s:
        meter.merge_traces(measured.clock_offsets_s)
    if state.last and state.last.classes:  # a restored evaluation has no images
        try:
            save_worst_images(process.rundir.worst, state.last.worst, context.datasets.val)
        except Exception as error:  # a user's own data source may raise anything
            process.warn(
                f"{process.rundir.worst}: was not written: {type(error).__name__}: {error} (train without log.worst)"
            )


@dataclass(frozen=True)
class _StepServices:
    """Services that accompany the steps of a rank: logging, consensus and measurement."""

    logger: MetricsLogger
    accuracy: BatchAccuracy
    consensus: Consensus
    meter: RunMeter


def _create_trainer(
    context: RunContext, prepared: _PreparedModel, services: _StepServices, outputs: RunOutputs, process: RunProcess
) -> Trainer:
    """Create the training loop around a prepared model."""
    persistent, state = prepared.training_state, prepared.state
    recipe, plan, agreement, clock = context.recipe, context.plan, services.consensus, services.meter.clock
    precision, strategy, world = persistent.precision, persistent.strategy, context.world
    reporter = NonFiniteReporter(
        world, strategy, lambda: str(checkpoint_storage(context, process.rundir).newest() or "none")
    )
    limit = recipe.data.max_bad_images
    bad_images = BadImageRegistry(context.datasets, limit, agreement.union, outputs.log_bad_image, state.bad_images)
    replicas = build_replica_check(recipe.parallel, world, persistent.model, plan.check_replicas_every)
    alarm = IntervalTimer(plan.checkpoint_every_s if world.is_main else 0.0)
    eager_step = EagerStep(
        replica=prepared.replica,
        criterion=prepared.criterion,
        precision=precision,
        strategy=strategy,
        transfer=services.meter.transfer,
        transforms=context.create_transforms(precision.dtype),
        update=_create_update(context, persistent, reporter),
        clock=clock,
        accumulate=recipe.train.accumulate,
        accuracy=services.accuracy,
    )
    return Trainer(
        model=persistent.model,
        step=build_train_step(eager_step, prepared.graphs, outputs.sinks.warned),
        schedule=persistent.schedule,
        loader=services.meter.loader,
        evaluate_model=context.create_evaluator(
            precision, strategy, persistent.average, bad_images, process.should_stop_evaluation
        ),
        save_state=CheckpointSaver(
            persistent, outputs.checkpoint_values, outputs.writer, lambda: outputs.goodput.time_spent(clock.drain())
        ),
        coordinator=StepCoordinator(
            agreement, process.invocation.interrupts, process.deadline, alarm, bad_images.for_split("train"), replicas
        ),
        stopping=build_stop_rule(recipe.train.stop),
        clock=clock,
        logger=services.logger,
        seeder=StepSeeder(recipe.seed, world.rank, generators(context.device)),
        eval_every=StepInterval(plan.eval_every, plan.total_steps),
        save_every=StepInterval(plan.checkpoint_every, plan.total_steps),
        saves_at_end=recipe.checkpoint.every != "off",
        batch_size=plan.batch_size,
        total_steps=plan.total_steps,
    )


def _create_training_state(
    context: RunContext, model: nn.Module, precision: Precision, strategy: Strategy, layers: dict[str, int]
) -> TrainingState:
    """Create the components with a state of their own for a prepared `model`;

    `layers` is the result of `layers_for_decay`.
    """
    recipe = context.recipe
    named = precision.weights.named_parameters(model)
    optimizer = build_optimizer(recipe.optim, named, context.device.type, layers)
    average = build_weight_average(recipe.train.ema, model, optimizer, named)
    schedule, counters = build_lr_schedule(recipe.schedule, context.plan), build_extra_state(recipe.optim, optimizer)
    return TrainingState(model, optimizer, schedule, precision, average, strategy, counters)


def _create_update(context: RunContext, training_state: TrainingState, reporter: NonFiniteReporter) -> OptimizerUpdate:
    train, optimizer, precision = context.recipe.train, training_state.optimizer, training_state.precision
    return OptimizerUpdate(
        parameters=[parameter for group in optimizer.param_groups for parameter in group["params"]],
        optimizer=optimizer,
        schedule=training_state.schedule,
        precision=precision,
        strategy=training_state.strategy,
        guard=build_nonfinite_guard(train, precision, reporter, context.device),
        rollback=build_buffer_rollback(train, training_state.model),
        probe=GradientProbe(training_state.model),
        average=training_state.average,
        max_norm=math.inf if train.clip_norm == "off" else train.clip_norm,
    )
