"""Compose and run a training or an evaluation. Read it from top to bottom."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from torch import nn

from paceline.core.dataset import Source
from paceline.core.errors import CheckpointError, DataError, PacelineError
from paceline.core.health import findings, is_suspect
from paceline.core.results import EvalReport, RunResult, Status
from paceline.core.rundir import RunDir
from paceline.core.stages import FINISH
from paceline.core.world import World
from paceline.data.identity import dataset_digest
from paceline.measure.alarm import Alarm
from paceline.measure.machine import describe_machine
from paceline.measure.rate import Stopwatch, unix_s
from paceline.measure.spans import require_nvtx
from paceline.measure.timing import Timer, now_s
from paceline.models.trial import check_model
from paceline.parallel.agreement import Agreement, build_agreement
from paceline.parallel.device import choose_device, generators, set_threads
from paceline.parallel.group import Meeting, joined, meeting, once_a_node
from paceline.parallel.heartbeat import watched
from paceline.parallel.replicas import build_replicas
from paceline.parallel.strategy import Strategy, build_strategy
from paceline.recipe.effects import thin_batch
from paceline.recipe.own import check_own_parts, own_parts
from paceline.recipe.plan import resolve_batch, with_batch_size
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.parallel import Parallel
from paceline.train.accuracy import BatchAccuracy, build_accuracy
from paceline.train.average import build_average
from paceline.train.averaged import averaged
from paceline.train.bad_images import BadImages
from paceline.train.beginning import Beginning, begin, begun, checkpoint_to_start_from
from paceline.train.books import Books, checkpoints_of, open_books, open_telemetry
from paceline.train.cadence import Cadence
from paceline.train.captured import build_step, choose_graphs
from paceline.train.checkpoint import load_model, model_tensors
from paceline.train.compiled import compiled
from paceline.train.deadline import Deadline, build_deadline
from paceline.train.engine import StepSeed, Trainer
from paceline.train.graph import Graphs
from paceline.train.guard import Reporter, build_guard
from paceline.train.health import best_before, health_of_run, known_everywhere, known_of_weights
from paceline.train.job import Invocation, Job
from paceline.train.journal import Journal
from paceline.train.leave import kept_nowhere
from paceline.train.logsink import build_trace
from paceline.train.loss import CrossEntropy, build_loss
from paceline.train.meter import Measured, Meter, build_meter
from paceline.train.optim import build_optimizer, layers_of, layers_told
from paceline.train.optimizers.counters import build_counters
from paceline.train.orders import Council
from paceline.train.outcome import Around, Weights, summarise
from paceline.train.parts import Parts
from paceline.train.persist import Persistent
from paceline.train.precision import Precision, check_trained_model
from paceline.train.probe import Probe
from paceline.train.reading import Read, read_judged, read_own, silent
from paceline.train.rehearsal import rehearsal
from paceline.train.resume import (
    check_dataset,
    check_rundir,
    finished,
    is_of_launch,
    keep_batch,
    missing_end,
    other_code,
    unsaved,
)
from paceline.train.saver import Saver
from paceline.train.schedule import build_schedule
from paceline.train.sinks.build import require_sinks
from paceline.train.state import TrainState
from paceline.train.step import PlainStep
from paceline.train.stopping import build_stop_rule
from paceline.train.undo import build_undo
from paceline.train.update import Update
from paceline.train.worst import save_worst


def run(recipe: Recipe, world: World, rundir: RunDir, *, resume: bool = False, invocation: Invocation) -> RunResult:
    """Train `recipe` as one rank of `world`, and return the result. All ranks use rank 0's `rundir`.

    With `resume`, or after the launcher restarted the ranks, the run continues from its newest intact checkpoint, or
    starts if there is none; a finished run is returned as is. A stop signal ends the run early, with a checkpoint and
    status `preempted`. Raise `PacelineError` for errors that the user can fix.
    """
    requested = recipe
    with (
        invocation.interrupts as interrupts,
        meeting(world, recipe.parallel) as met,
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
            resume = resume or (world.may_be_again and is_of_launch(rundir, invocation.launch))
            recipe, notes = keep_batch(recipe, rundir, world.world_size) if resume else (recipe, [])
            recipe = resolve_batch(recipe, world.world_size)
            changes = [*notes, *check_rundir(rundir, recipe, resume=resume)]
        recipe = with_batch_size(recipe, int(met.share("batch_size", str(recipe.data.batch_size))))
        rundir = RunDir(Path(met.share("rundir", str(rundir.path))))
        resume = met.share("resume", "yes" if resume else "") == "yes"
        ended = finished(rundir) if resume and world.is_main else None
        result = met.share("ended", ended.model_dump_json() if ended else "")
        if result:
            return RunResult.model_validate_json(result).of(rundir.path)
        whereabouts = invocation.whereabouts
        exit_stack.enter_context(watched(met, recipe.parallel, whereabouts, interrupts, rundir.stacks(world.rank)))
        job = Job(rundir, invocation, met, whereabouts, first_s)
        check_own_parts(recipe)
        if world.is_main:
            require_sinks(recipe.log)
        with _parts(recipe, met, partial(read_own, recipe), world.world_size, whereabouts.waits) as parts:
            parts = parts.noting(thin_batch(requested, world.world_size, parts.device.type))
            parts = parts.noting(*check_trained_model(recipe, parts.plan, parts.device))
            start_from = _start(parts, job) if resume else ""
            if start_from and world.is_main:
                changes = [*changes, *other_code(Path(start_from), recipe)]
            return _train(parts.noting(*changes), job, start_from=start_from).of(rundir.path)


def evaluate(
    recipe: Recipe,
    world: World,
    checkpoint: Path,
    *,
    own: Recipe,
    say: Callable[[str], None],
    keep: Callable[[EvalReport, Source], None] = kept_nowhere,
) -> EvalReport:
    """Evaluate the raw and averaged weights of `checkpoint` on the data of `recipe`, as one rank of `world`.

    `own` is the recipe of the checkpoint's run. If `recipe` names another dataset, classes are matched by name, and
    rank 0 reports this through `say`. `keep` receives the report and the dataset while it can be read. Only the model
    and the dataset of `recipe` are imported; the caller has checked that the user allows their code.
    """
    read = partial(read_judged, recipe, own, checkpoint, say if world.is_main else silent)
    with meeting(world, recipe.parallel) as met, contextlib.ExitStack() as exit_stack:
        for plugin in own_parts(recipe):
            if plugin.path in ("model", "data.source"):
                plugin.load()
        parts = exit_stack.enter_context(_parts(recipe, met, read, train_ranks=1))
        if not parts.plan.val_images:
            raise DataError("data.source: there are no validation images to evaluate on (name some by data.source.*)")
        check_model(recipe.model, parts.plan)
        # The plan is for one rank: the training batch size may not divide over the ranks that evaluate.
        if recipe.data.eval_batch_size == "auto":
            eval_batch = -(-parts.plan.eval_batch // world.world_size)
            parts = replace(parts, plan=replace(parts.plan, eval_batch=eval_batch))
        precision = parts.precision()
        model = parts.model(precision, is_new=False)
        load_model(checkpoint, model)
        strategy = build_strategy(
            Parallel(), world, parts.device
        )  # the weights are whole, whichever strategy trained them
        average = averaged(recipe, model, precision, checkpoint)
        report = parts.judge(precision, strategy, average)(model)
        assert report is not None, "a stand-alone evaluation is never preempted"
        evidence = known_of_weights(report)
        if recipe.data.source == own.data.source:  # another dataset has no training images and no best evaluation
            best, best_step = best_before(checkpoint)
            if is_suspect(replace(evidence, best=best, best_step=best_step)):
                check = parts.check_batch_norm(precision, strategy, average, model)
                evidence = replace(evidence, batch_norm=check)
        report = report.model_copy(update={"health": findings(evidence)})
        if world.is_main:
            keep(report, parts.datasets.val)
        return report


@contextlib.contextmanager
def _parts(
    recipe: Recipe, met: Meeting, read: Read, train_ranks: int, waits: Callable[[], None] = lambda: None
) -> Iterator[Parts]:
    """Choose the device, connect the ranks, `read` the data, and plan the training on `train_ranks` ranks.

    `waits` is called regularly while another rank reads the data.
    """
    world = met.world
    device = choose_device(recipe.parallel, world)
    set_threads(recipe.parallel, world)
    with joined(met, recipe.parallel, device), contextlib.ExitStack() as exit_stack:
        recipe, datasets = once_a_node(met, partial(read, exit_stack), waits)
        parts = Parts.derive(recipe, world, device, datasets, exit_stack, train_ranks)
        parts.check_room()
        yield parts


def _start(parts: Parts, job: Job) -> str:
    """Return the checkpoint to resume from, the same on every rank, or an empty string."""
    newest = None
    if parts.world.is_main:
        checkpoints = checkpoints_of(parts, job.rundir)
        checkpoints.tidy()
        newest = checkpoints.newest_whole(job.warn)
        if newest:
            check_dataset(newest, dataset_digest(parts.datasets))
            if missing := missing_end(job.rundir):
                job.warn(f"{missing}; the run is resumed from {newest.name}")
    return job.met.share("start_from", str(newest or ""))


@dataclass(frozen=True)
class _Ready:
    """A model that is ready to train, with everything that updates it.

    `graphs` captures its steps, or is None for eager steps. `beginning` describes the initial weights.
    """

    replica: nn.Module
    criterion: CrossEntropy
    persistent: Persistent
    state: TrainState
    compile_s: float
    graphs: Graphs | None
    beginning: Beginning


def _ready(parts: Parts, met: Meeting, start_from: str) -> tuple[Parts, _Ready]:
    """Create the model or load it from the checkpoint `start_from`; return the context with more notes, and the model.

    Passes before the first step compile the model per image size, and let DDP order its buckets.
    """
    recipe, measure = parts.recipe, parts.recipe.measure
    if measure.nvtx != "off":
        require_nvtx()
    precision = parts.precision()
    model = parts.model(precision, is_new=not start_from)
    if start_from:
        load_model(Path(start_from), model)
        beginning = begun(start_from)
    else:
        weights = checkpoint_to_start_from(recipe.model.weights) if parts.world.is_main else ""
        beginning = begin(recipe.model, model, met.share("weights", weights))
    now = now_s if measure.communication == "on" else None
    strategy = build_strategy(recipe.parallel, parts.world, parts.device, now, measure.warmup_steps)
    layers = layers_of(recipe.optim, model)
    replica = compiled(strategy.prepare(model), recipe.train.compile, len(parts.plan.train_sizes))
    persistent = _persistent(parts, model, precision, strategy, layers)
    criterion, weights_note = build_loss(recipe.train, parts.datasets.train, parts.device)
    state = persistent.restore(Path(start_from)) if start_from else TrainState()
    warm_up = partial(rehearsal, model, replica, parts.placement(precision.dtype), precision, parts.plan)
    compiling = Timer()
    if recipe.train.compile != "off":
        with compiling.turn():
            for first in (state.step, *(start for start, _ in parts.plan.train_sizes if start > state.step)):
                warm_up(first)
    strategy.rehearse(partial(warm_up, state.step))
    comm_note = persistent.recall(Path(start_from)) if start_from else ""
    graphs, graphs_note = choose_graphs(recipe, parts.world, parts.device, persistent.optimizer)
    notes = (
        beginning.note,
        layers_told(recipe.optim, persistent.optimizer, layers),
        weights_note,
        comm_note,
        graphs_note,
    )
    return parts.noting(*notes), _Ready(replica, criterion, persistent, state, compiling.total_s, graphs, beginning)


def _train(parts: Parts, job: Job, *, start_from: str) -> RunResult:
    parts, ready = _ready(parts, job.met, start_from)
    recipe, world, persistent, state = parts.recipe, parts.world, ready.persistent, ready.state
    strategy = persistent.strategy
    machine = describe_machine()
    books = open_books(
        parts, job, persistent, machine, state, ready.beginning.facts
    )  # from here on a failure must close the sinks
    with contextlib.ExitStack() as on_error:
        on_error.callback(books.sinks.close)
        job.met.share("opened", "yes")  # the other ranks write into the folder that rank 0 created
        job = replace(job, deadline=_deadline(parts, job, books))
        watch = Stopwatch(state.trained_s, train_before_s=state.train_s)
        accuracy = build_accuracy(recipe.train.accuracy, parts.plan.num_classes, parts.device)
        trace = build_trace(recipe.log, job.rundir, world.rank, state.step)
        journal = Journal(parts.plan, strategy, persistent.schedule, books.sinks, trace, watch, accuracy, state)
        agreement = build_agreement(world, 3, job.met.timeout)
        on_error.pop_all()
    with contextlib.closing(journal):  # closes the sinks, which receive the result
        with (
            contextlib.closing(books.writer),
            contextlib.closing(agreement),
            open_telemetry(parts, job, strategy, books.sinks.warned) as telemetry,
        ):
            loader = parts.train_loader(parts.placement(persistent.precision.dtype))
            place = parts.placement(persistent.precision.dtype, timed=recipe.measure.clock == "on")
            meter = build_meter(parts, job.rundir, strategy, loader, place, books.sinks.warned)
            trainer = _trainer(parts, ready, _Running(journal, accuracy, agreement, meter), books, job)
            job.whereabouts.where = lambda: (state.step, trainer.clock.where)
            status = trainer.fit(state)
            job.whereabouts.where = lambda: (state.step, FINISH)
            status = _agreed(status, job.met)
            if status == "preempted":
                job.met.share("saved", "yes")  # a launcher may kill all ranks once one exits with code 75
            finishing = Timer()
            with finishing.turn():
                measured = meter.read()
                weights = Weights.of(persistent.model, strategy.gather(model_tensors(persistent.model)))
                evidence = known_everywhere(state, status, parts.plan.steps_per_epoch, persistent.precision)
                check = None
                if status != "preempted" and is_suspect(evidence):  # a preempted run has no time
                    check = parts.check_batch_norm(persistent.precision, strategy, persistent.average, persistent.model)

        result = summarise(
            parts,
            state,
            weights,
            measured,
            watch,
            status=status,
            around=Around(watch.started_s - job.invocation.started_s, ready.compile_s, finishing.total_s),
            ledger=books.ledger,
            checkpoints=books.writer.result(),
            health=health_of_run(evidence, job.rundir, check) if world.is_main else None,
            provenance={
                **machine,
                "device": parts.device.type,
                "launcher": world.launcher,
                "command": job.invocation.command,
                **job.invocation.provenance,
                **books.origin,
                **_stopped_by(status, job),
                **({"telemetry_missing": telemetry.missing} if telemetry.missing else {}),
            },
        )
        books.ledger.end(state.step, watch.elapsed_s, status)
        if world.is_main:
            _write_result(result, job)
            books.sinks.finished(result)
            _add_pictures(parts, job, meter, measured, state)
    return result


def _write_result(result: RunResult, job: Job) -> None:
    """Write `result.json`. Raise `CheckpointError` if the final weights could not be saved either."""
    try:
        job.rundir.write_result(result)
    except PacelineError as error:
        if result.status == "failed":
            raise CheckpointError(f"{unsaved(job.rundir, result)}; {error}") from None
        raise


def _stopped_by(status: Status, job: Job) -> dict[str, str]:
    """Return the stop signal of a preempted run, if this rank received it."""
    requested = job.invocation.interrupts.requested
    return {"stopped_by": requested} if status == "preempted" and requested else {}


def _agreed(status: Status, met: Meeting) -> Status:
    """Return the final status as known to rank 0, the rank that saves."""
    return "failed" if met.share("unsaved", "yes" if status == "failed" else "") else status


def _deadline(parts: Parts, job: Job, books: Books) -> Deadline:
    """Return the deadline that stops the run before its batch job ends."""
    plan, invocation = parts.plan, job.invocation
    return build_deadline(
        invocation.batch_job,
        parts.world,
        Cadence(plan.eval_every, plan.total_steps),
        lambda: books.writer.slowest_s,
        invocation.interrupts.request,
        job.warn,
        grace_s=parts.recipe.checkpoint.grace.seconds,
    )


def _add_pictures(parts: Parts, job: Job, meter: Meter, measured: Measured, state: TrainState) -> None:
    """Write the merged trace and the worst images. A finished run does not fail if this is impossible."""
    if measured.clock_offsets_s:
        meter.merge_traces(measured.clock_offsets_s)
    if state.last and state.last.classes:  # a restored evaluation has no images
        try:
            save_worst(job.rundir.worst, state.last.worst, parts.datasets.val)
        except Exception as error:  # a user's own data source may raise anything
            job.warn(f"{job.rundir.worst}: was not written: {type(error).__name__}: {error} (train without log.worst)")


@dataclass(frozen=True)
class _Running:
    """Services that accompany the steps of a rank: logging, consensus and measurement."""

    journal: Journal
    accuracy: BatchAccuracy
    agreement: Agreement
    meter: Meter


def _trainer(parts: Parts, ready: _Ready, running: _Running, books: Books, job: Job) -> Trainer:
    """Create the training loop around a prepared model."""
    persistent, state = ready.persistent, ready.state
    recipe, plan, agreement, clock = parts.recipe, parts.plan, running.agreement, running.meter.clock
    precision, strategy, world = persistent.precision, persistent.strategy, parts.world
    reporter = Reporter(world, strategy, lambda: str(checkpoints_of(parts, job.rundir).newest() or "none"))
    limit = recipe.data.max_bad_images
    bad_images = BadImages(parts.datasets, limit, agreement.union, books.list_bad_image, state.bad_images)
    replicas = build_replicas(recipe.parallel, world, persistent.model, plan.check_replicas_every)
    alarm = Alarm(plan.checkpoint_every_s if world.is_main else 0.0)
    eager_step = PlainStep(
        replica=ready.replica,
        criterion=ready.criterion,
        precision=precision,
        strategy=strategy,
        place=running.meter.place,
        finish=parts.finish(precision.dtype),
        update=_update(parts, persistent, reporter),
        clock=clock,
        accumulate=recipe.train.accumulate,
        accuracy=running.accuracy,
    )
    return Trainer(
        model=persistent.model,
        step=build_step(eager_step, ready.graphs, books.sinks.warned),
        schedule=persistent.schedule,
        loader=running.meter.loader,
        evaluate=parts.judge(precision, strategy, persistent.average, bad_images, job.leaves_evaluation),
        save=Saver(persistent, books.facts, books.writer, lambda: books.ledger.spent(clock.drain())),
        council=Council(agreement, job.invocation.interrupts, job.deadline, alarm, bad_images.of("train"), replicas),
        stop_rule=build_stop_rule(recipe.train.stop),
        clock=clock,
        journal=running.journal,
        seed=StepSeed(recipe.seed, world.rank, generators(parts.device)),
        evaluation=Cadence(plan.eval_every, plan.total_steps),
        saving=Cadence(plan.checkpoint_every, plan.total_steps),
        saves=recipe.checkpoint.every != "off",
        batch_size=plan.batch_size,
        total_steps=plan.total_steps,
    )


def _persistent(
    parts: Parts, model: nn.Module, precision: Precision, strategy: Strategy, layers: dict[str, int]
) -> Persistent:
    """Create the components with a state of their own for a prepared `model`; `layers` is the result of `layers_of`."""
    recipe = parts.recipe
    named = precision.weights.named(model)
    optimizer = build_optimizer(recipe.optim, named, parts.device.type, layers)
    average = build_average(recipe.train.ema, model, optimizer, named)
    schedule, counters = build_schedule(recipe.schedule, parts.plan), build_counters(recipe.optim, optimizer)
    return Persistent(model, optimizer, schedule, precision, average, strategy, counters)


def _update(parts: Parts, persistent: Persistent, reporter: Reporter) -> Update:
    train, optimizer, precision = parts.recipe.train, persistent.optimizer, persistent.precision
    return Update(
        parameters=[parameter for group in optimizer.param_groups for parameter in group["params"]],
        optimizer=optimizer,
        schedule=persistent.schedule,
        precision=precision,
        strategy=persistent.strategy,
        guard=build_guard(train, precision, reporter, parts.device),
        undo=build_undo(train, persistent.model),
        probe=Probe(persistent.model),
        average=persistent.average,
        max_norm=math.inf if train.clip_norm == "off" else train.clip_norm,
    )
