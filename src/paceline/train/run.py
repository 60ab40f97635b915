"""The composition root: a recipe and a world in, a run directory and a result out. Read it top to bottom."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from paceline.core.dataset import Datasets
from paceline.core.results import EvalReport, RunResult
from paceline.core.rundir import RunDir
from paceline.core.world import World
from paceline.data.identity import dataset_digest
from paceline.data.sources.build import build_datasets
from paceline.measure import build_clock
from paceline.measure.alarm import Alarm
from paceline.measure.machine import describe_machine
from paceline.measure.rate import Stopwatch
from paceline.models.pretrained import start_from_weights
from paceline.models.trial import check_model
from paceline.parallel.agreement import Agreement, build_agreement
from paceline.parallel.device import choose_device, generators, set_threads
from paceline.parallel.group import Meeting, joined, meeting, once_a_node
from paceline.parallel.heartbeat import watched
from paceline.parallel.replicas import build_replicas
from paceline.parallel.strategy import Strategy, build_strategy
from paceline.recipe.plan import Plan
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.parallel import Parallel
from paceline.train.attempts import Ledger, NoLedger, build_ledger
from paceline.train.average import build_average
from paceline.train.bad_images import BadImages
from paceline.train.cadence import Cadence
from paceline.train.checkpoint import Checkpoints, Keep, Writer, load_model, model_tensors
from paceline.train.compiled import compiled
from paceline.train.disk import check_disk, expected_bytes
from paceline.train.engine import StepSeed, Trainer
from paceline.train.guard import Reporter, build_guard
from paceline.train.interrupt import Interrupts
from paceline.train.journal import Journal
from paceline.train.logsink import LogSink, Sinks, build_sinks, build_trace, require_tensorboard
from paceline.train.loss import CrossEntropy
from paceline.train.optim import build_optimizer
from paceline.train.orders import Council
from paceline.train.outcome import summarise
from paceline.train.parts import Parts
from paceline.train.persist import Persistent
from paceline.train.precision import Precision
from paceline.train.probe import Probe
from paceline.train.rehearsal import rehearsal
from paceline.train.resume import check_dataset, check_rundir, finished, is_of_launch, open_rundir
from paceline.train.saver import NoWriter, Saver, Writes
from paceline.train.schedule import build_schedule
from paceline.train.state import TrainState
from paceline.train.stopping import build_stop_rule
from paceline.train.undo import build_undo
from paceline.train.update import Update
from paceline.train.whereabouts import Whereabouts


@dataclass(frozen=True)
class Invocation:
    """How a run was asked for: when (`time.perf_counter` seconds), in which words, and who listens on rank 0.

    `launch` is what torchrun or Slurm call the job, the same when they start its ranks again. `interrupts` may have
    been entered before, so that a signal that came while torch was imported is known.
    """

    started_s: float = field(default_factory=time.perf_counter)
    command: tuple[str, ...] = ()
    listeners: Sequence[LogSink] = ()
    launch: str = ""
    interrupts: Interrupts = field(default_factory=Interrupts)


@dataclass(frozen=True)
class _Job:
    """A run in this process: where it writes, who asked for it and may end it, whom it meets, and where it is."""

    rundir: RunDir
    invocation: Invocation
    met: Meeting
    whereabouts: Whereabouts

    def warn(self, message: str) -> None:
        """Tell whoever listens, on rank 0."""
        for listener in self.invocation.listeners:
            listener.warned(message)

    def leaves_evaluation(self) -> bool:
        """Note that a batch of an evaluation begins; return whether it is to be given up."""
        self.whereabouts.batches += 1
        return bool(self.invocation.interrupts.requested)


def run(recipe: Recipe, world: World, rundir: RunDir, *, resume: bool = False, invocation: Invocation) -> RunResult:
    """Train `recipe` as one rank of `world`; return the result. `rundir` is rank 0's, the others follow it.

    With `resume`, and where a launcher has started the ranks of this run again, it goes on from its newest whole
    checkpoint, or starts when it has none; a run that has ended is left as it is. A signal to stop ends it early,
    saved, with status `preempted`. Raise `PacelineError` for what a user can mend.
    """
    with invocation.interrupts as interrupts, meeting(world, recipe.parallel) as met, contextlib.ExitStack() as held:
        changes: Sequence[str] = ()
        if world.is_main:
            held.enter_context(rundir.lock(world.launcher_pid))
            resume = resume or (world.attempt > 0 and is_of_launch(rundir, invocation.launch))
            changes = check_rundir(rundir, recipe, resume=resume)
        rundir = RunDir(Path(met.share("rundir", str(rundir.path))))
        resume = met.share("resume", "yes" if resume else "") == "yes"
        ended = finished(rundir) if resume and world.is_main else None
        result = met.share("ended", ended.model_dump_json() if ended else "")
        if result:
            return RunResult.model_validate_json(result)
        whereabouts = Whereabouts()
        held.enter_context(watched(met, recipe.parallel, whereabouts, interrupts, rundir.stacks(world.rank)))
        job = _Job(rundir, invocation, met, whereabouts)
        with _parts(recipe, met, world.world_size, whereabouts.waits) as parts:
            return _train(parts.noting(*changes), job, start_from=_start(parts, job) if resume else "")


def evaluate(recipe: Recipe, world: World, checkpoint: Path) -> EvalReport:
    """Evaluate the weights in `checkpoint`, raw and averaged, on the data of `recipe`, as one rank of `world`."""
    with meeting(world, recipe.parallel) as met, _parts(recipe, met, train_ranks=1) as parts:
        # The training batch need not divide over the ranks that evaluate, so the plan is that of one.
        if recipe.data.eval_batch_size == "auto":
            eval_batch = -(-parts.plan.eval_batch // world.world_size)
            parts = replace(parts, plan=replace(parts.plan, eval_batch=eval_batch))
        precision = parts.precision()
        model = parts.model(precision, is_new=False)
        load_model(checkpoint, model)
        strategy = build_strategy(Parallel(), world, parts.device)  # weights are whole here, however they were trained
        persistent = _persistent(parts, model, precision, strategy)
        persistent.restore_average(checkpoint)
        report = parts.judge(precision, strategy, persistent.average)(model)
        assert report is not None, "nothing ends an evaluation that stands alone"
        return report


@contextlib.contextmanager
def _parts(recipe: Recipe, met: Meeting, train_ranks: int, waits: Callable[[], None] = lambda: None) -> Iterator[Parts]:
    """Choose the device, join the ranks, read the data and make the plan of training on `train_ranks`.

    `waits` is called now and then while another rank reads the data.
    """
    world = met.world
    device = choose_device(recipe.parallel, world)
    set_threads(recipe.parallel, world)
    with joined(met, recipe.parallel, device):
        datasets = once_a_node(met, partial(_datasets, recipe), waits)
        plan = Plan.derive(recipe, train_ranks, datasets.train.info, datasets.val.info)
        check_model(recipe.model, plan)
        parts = Parts(recipe, world, device, datasets, plan)
        parts.check_room()
        yield parts


def _start(parts: Parts, job: _Job) -> str:
    """Return the checkpoint that a resumed run goes on from, the same on every rank, or nothing."""
    newest = None
    if parts.world.is_main:
        checkpoints = _checkpoints(parts, job.rundir)
        checkpoints.tidy()
        newest = checkpoints.newest_whole(job.warn)
        if newest:
            check_dataset(newest, dataset_digest(parts.datasets))
    return job.met.share("start_from", str(newest or ""))


def _datasets(recipe: Recipe, is_first: bool) -> Datasets:
    """Read both splits; the first rank of a node fetches them where they are not there."""
    skip_bad = recipe.data.on_bad_image == "skip"
    return build_datasets(recipe.data.source, may_download=is_first, skip_bad=skip_bad)


def _train(parts: Parts, job: _Job, *, start_from: str) -> RunResult:
    recipe, world = parts.recipe, parts.world

    precision = parts.precision()
    model = parts.model(precision, is_new=not start_from)
    if start_from:
        load_model(Path(start_from), model)
    else:
        parts = parts.noting(start_from_weights(recipe.model, model))
    strategy = build_strategy(recipe.parallel, world, parts.device)
    replica = compiled(strategy.prepare(model), recipe.train.compile)
    persistent = _persistent(parts, model, precision, strategy)
    state = persistent.restore(Path(start_from)) if start_from else TrainState()
    place = parts.placement(precision)
    strategy.rehearse(lambda: rehearsal(model, replica, place, precision, parts.plan, state.step))

    machine = describe_machine()
    books = _open_books(parts, job, persistent, machine, state)  # what is refused before leaves nothing behind
    job.met.share("opened", "yes")  # the others write into the folder that rank 0 has made
    watch = Stopwatch(state.trained_s)
    trace = build_trace(recipe.log, job.rundir, world.rank, state.step)
    journal = Journal(parts.plan, strategy, persistent.schedule, books.sinks, trace, watch, state)
    agreement = build_agreement(world, 3, job.met.timeout)
    with contextlib.closing(journal), contextlib.closing(books.writer), contextlib.closing(agreement):
        trainer = _trainer(parts, replica, persistent, journal, agreement, books, job, state)
        job.whereabouts.where = lambda: (state.step, trainer.clock.where)
        status = trainer.fit(state)
        if status == "preempted":
            job.met.share("saved", "yes")  # a launcher may end all as soon as one has left with 75

    result = summarise(
        parts,
        state,
        strategy.gather(model_tensors(model)),
        trainer.clock.drain(),
        watch,
        status=status,
        startup_s=watch.started_s - job.invocation.started_s,
        ledger=books.ledger,
        checkpoints=books.writer.result(),
        provenance={
            **machine,
            "device": parts.device.type,
            "launcher": world.launcher,
            "command": job.invocation.command,
        },
    )
    books.ledger.end(state.step, watch.elapsed_s, status)
    if world.is_main:
        job.rundir.write_result(result)
    return result


def _trainer(
    parts: Parts,
    replica: nn.Module,
    persistent: Persistent,
    journal: Journal,
    agreement: Agreement,
    books: "_Books",
    job: _Job,
    state: TrainState,
) -> Trainer:
    """Put the engine together around a replica and what persists of it."""
    recipe, plan, measure = parts.recipe, parts.plan, parts.recipe.measure
    precision, strategy, world = persistent.precision, persistent.strategy, parts.world
    reporter = Reporter(world, strategy, lambda: str(_checkpoints(parts, job.rundir).newest() or "none"))
    limit = recipe.data.max_bad_images
    bad_images = BadImages(parts.datasets, limit, agreement.union, books.list_bad_image, state.bad_images)
    replicas = build_replicas(recipe.parallel, world, persistent.model, plan.check_replicas_every)
    clock = build_clock(measure.clock, device_type=parts.device.type, warmup_steps=measure.warmup_steps)
    alarm = Alarm(plan.checkpoint_every_s if world.is_main else 0.0)
    return Trainer(
        model=persistent.model,
        replica=replica,
        criterion=CrossEntropy(recipe.train.label_smoothing),
        update=_update(parts, persistent, reporter),
        schedule=persistent.schedule,
        precision=precision,
        strategy=strategy,
        place=parts.placement(precision),
        finish=parts.finish(precision),
        loader=parts.train_loader(),
        evaluate=parts.judge(precision, strategy, persistent.average, bad_images, job.leaves_evaluation),
        save=Saver(persistent, books.facts, books.writer, lambda: books.ledger.spent(clock.drain())),
        council=Council(agreement, job.invocation.interrupts, alarm, bad_images.of("train"), replicas),
        stop_rule=build_stop_rule(recipe.train.stop),
        clock=clock,
        journal=journal,
        seed=StepSeed(recipe.seed, world.rank, generators(parts.device)),
        evaluation=Cadence(plan.eval_every, plan.total_steps),
        saving=Cadence(plan.checkpoint_every, plan.total_steps),
        saves=recipe.checkpoint.every != "off",
        accumulate=recipe.train.accumulate,
        batch_size=plan.batch_size,
        total_steps=plan.total_steps,
    )


@dataclass(frozen=True)
class _Books:
    """Where rank 0 writes: records, checkpoints and what goes along with them, the ledger, and bad images.

    The other ranks have the same, and nothing comes of it.
    """

    sinks: Sinks
    writer: Writes
    facts: Mapping[str, Any]
    ledger: Ledger
    list_bad_image: Callable[[dict[str, str | int]], None]


def _open_books(parts: Parts, job: _Job, persistent: Persistent, machine: dict[str, Any], state: TrainState) -> _Books:
    """Write what is known before the first step, and return where the rest goes; rank 0 alone writes."""
    recipe, rundir, section = parts.recipe, job.rundir, parts.recipe.checkpoint
    facts: dict[str, Any] = {"recipe_hash": recipe.hash, "world_size": parts.world.world_size}
    if not parts.world.is_main:
        return _Books(Sinks(()), NoWriter(), facts, NoLedger(), lambda row: None)
    require_tensorboard(recipe.log)
    check_disk(rundir, section, expected_bytes(persistent, recipe.optim), job.warn)
    ledger = build_ledger(
        rundir,
        parts.world,
        from_step=state.step,
        trained_s=state.trained_s,
        before=state.spent,
        startup_s=Stopwatch().started_s - job.invocation.started_s,
        launch=job.invocation.launch,
    )  # before the recipe: whose run a folder with a recipe is, is known
    open_rundir(rundir, recipe)
    rundir.write_json("plan.json", parts.plan.to_dict())
    rundir.write_json("machine.json", machine)
    listeners = job.invocation.listeners
    sinks = build_sinks(rundir, recipe, state.step, listeners, last_eval=state.last_step)
    sinks.started(parts.plan, state.step)
    writer = Writer(
        _checkpoints(parts, rundir),
        background=section.background == "on",
        on_failure=section.on_failure,
        warn=sinks.warned,
        saved_step=state.step or -1,
    )
    return _Books(sinks, writer, {**facts, "dataset": dataset_digest(parts.datasets)}, ledger, rundir.add_bad_image)


def _checkpoints(parts: Parts, rundir: RunDir) -> Checkpoints:
    section = parts.recipe.checkpoint
    keep = Keep(section.keep, best=section.keep_best == "on", every=parts.plan.checkpoint_keep_every)
    return Checkpoints(rundir.checkpoints, keep)


def _persistent(parts: Parts, model: nn.Module, precision: Precision, strategy: Strategy) -> Persistent:
    """Build what moves the weights of a prepared `model`, and has a state of its own."""
    recipe = parts.recipe
    named = precision.weights.named(model)
    optimizer = build_optimizer(recipe.optim, named, parts.device.type)
    average = build_average(recipe.train.ema, model, optimizer, named)
    return Persistent(model, optimizer, build_schedule(recipe.schedule, parts.plan), precision, average, strategy)


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
