"""The composition root: a recipe and a world in, a run directory and a result out. Read it top to bottom."""

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from paceline.core.results import EvalReport, RunResult
from paceline.core.rundir import RunDir
from paceline.core.world import World
from paceline.data.sources.build import build_datasets
from paceline.measure import build_clock
from paceline.measure.machine import describe_machine
from paceline.measure.rate import Stopwatch
from paceline.models.pretrained import start_from_weights
from paceline.models.trial import check_model
from paceline.parallel.device import choose_device, generators, set_threads
from paceline.parallel.group import Meeting, joined, meeting, once_a_node
from paceline.parallel.strategy import Strategy, build_strategy
from paceline.recipe.plan import Plan
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.parallel import Parallel
from paceline.train.average import build_average
from paceline.train.cadence import Cadence
from paceline.train.checkpoint import Checkpoints, load_model, model_tensors
from paceline.train.compiled import compiled
from paceline.train.engine import StepSeed, Trainer
from paceline.train.guard import Reporter, build_guard
from paceline.train.journal import Journal
from paceline.train.logsink import LogSink, Sinks, build_sinks, build_trace, require_tensorboard
from paceline.train.loss import CrossEntropy
from paceline.train.optim import build_optimizer
from paceline.train.outcome import summarise
from paceline.train.parts import Parts
from paceline.train.persist import Persistent
from paceline.train.precision import Precision
from paceline.train.probe import Probe
from paceline.train.rehearsal import rehearsal
from paceline.train.resume import check_rundir, finished, open_rundir
from paceline.train.schedule import build_schedule
from paceline.train.state import TrainState
from paceline.train.stopping import build_stop_rule
from paceline.train.undo import build_undo
from paceline.train.update import Update


@dataclass(frozen=True)
class Invocation:
    """How a run was asked for: when (`time.perf_counter` seconds), in which words, and who listens on rank 0."""

    started_s: float = field(default_factory=time.perf_counter)
    command: tuple[str, ...] = ()
    listeners: Sequence[LogSink] = ()


def run(recipe: Recipe, world: World, rundir: RunDir, *, resume: bool = False, invocation: Invocation) -> RunResult:
    """Train `recipe` as one rank of `world`; return the result. `rundir` is rank 0's, the others follow it.

    With `resume` the run goes on from its newest checkpoint, or starts when it has none; a run that has ended is
    left as it is. Raise `PacelineError` for what a user can mend.
    """
    with meeting(world, recipe.parallel) as met:
        if world.is_main:
            check_rundir(rundir, recipe, resume=resume)
        rundir = RunDir(Path(met.share("rundir", str(rundir.path))))
        ended = finished(rundir) if resume and world.is_main else None
        if met.share("ended", "yes" if ended else "no") == "yes":
            return ended or rundir.read_result()
        with _parts(recipe, met, train_ranks=world.world_size) as parts:
            newest = Checkpoints(rundir.checkpoints, recipe.checkpoint.keep).newest() if resume else None
            return _train(parts, rundir, invocation, met, start_from=met.share("start_from", str(newest or "")))


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
        return parts.judge(precision, strategy, persistent.average)(model)


@contextlib.contextmanager
def _parts(recipe: Recipe, met: Meeting, train_ranks: int) -> Iterator[Parts]:
    """Choose the device, join the ranks, read the data and make the plan of training on `train_ranks`."""
    world = met.world
    device = choose_device(recipe.parallel, world)
    set_threads(recipe.parallel, world)
    with joined(met, recipe.parallel, device):
        datasets = once_a_node(world, lambda is_first: build_datasets(recipe.data.source, may_download=is_first))
        plan = Plan.derive(recipe, train_ranks, datasets.train.info, datasets.val.info)
        check_model(recipe.model, plan)
        yield Parts(recipe, world, device, datasets, plan)


def _train(parts: Parts, rundir: RunDir, invocation: Invocation, met: Meeting, *, start_from: str) -> RunResult:
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
    sinks = _records(parts, rundir, machine, state, invocation)  # what is refused before this leaves nothing behind
    met.share("opened", "yes")  # the others write into the folder that rank 0 has made
    watch = Stopwatch(state.trained_s)
    trace = build_trace(recipe.log, rundir, world.rank, state.step)
    journal = Journal(parts.plan, strategy, persistent.schedule, sinks, trace, watch, state)
    trainer = _trainer(parts, replica, persistent, journal, Checkpoints(rundir.checkpoints, recipe.checkpoint.keep))
    with contextlib.closing(journal):
        trainer.fit(state)

    result = summarise(
        parts,
        state,
        strategy.gather(model_tensors(model)),
        trainer.clock.drain(),
        watch,
        status="target_reached" if trainer.stop_rule.reached(state) else "completed",
        startup_s=watch.started_s - invocation.started_s,
        provenance={**machine, "device": parts.device.type, "launcher": world.launcher, "command": invocation.command},
    )
    if world.is_main:
        rundir.write_result(result)
    return result


def _trainer(
    parts: Parts, replica: nn.Module, persistent: Persistent, journal: Journal, checkpoints: Checkpoints
) -> Trainer:
    """Put the engine together around a replica and what persists of it."""
    recipe, plan, measure = parts.recipe, parts.plan, parts.recipe.measure
    precision, strategy = persistent.precision, persistent.strategy
    reporter = Reporter(parts.world, strategy, lambda: str(checkpoints.newest() or "none"))
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
        evaluate=parts.judge(precision, strategy, persistent.average),
        save=_Saver(checkpoints, persistent, parts),
        stop_rule=build_stop_rule(recipe.train.stop),
        clock=build_clock(measure.clock, device_type=parts.device.type, warmup_steps=measure.warmup_steps),
        journal=journal,
        seed=StepSeed(recipe.seed, parts.world.rank, generators(parts.device)),
        evaluation=Cadence(plan.eval_every, plan.total_steps),
        saving=Cadence(plan.checkpoint_every, plan.total_steps),
        accumulate=recipe.train.accumulate,
        batch_size=plan.batch_size,
        total_steps=plan.total_steps,
    )


def _records(parts: Parts, rundir: RunDir, machine: dict[str, Any], state: TrainState, invocation: Invocation) -> Sinks:
    """Write what is known before the first step, and return where the rest goes; rank 0 alone writes."""
    if not parts.world.is_main:
        return Sinks(())
    require_tensorboard(parts.recipe.log)
    open_rundir(rundir, parts.recipe)
    rundir.write_json("plan.json", parts.plan.to_dict())
    rundir.write_json("machine.json", machine)
    sinks = build_sinks(rundir, parts.recipe, state.step, invocation.listeners)
    sinks.started(parts.plan, state.step)
    return sinks


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


@dataclass(frozen=True)
class _Saver:
    """Write a checkpoint from rank 0; every rank adds its shards, where there are any."""

    checkpoints: Checkpoints
    persistent: Persistent
    parts: Parts

    def __call__(self, state: TrainState) -> None:
        facts = {"recipe_hash": self.parts.recipe.hash, "world_size": self.parts.world.world_size}
        snapshot = self.persistent.capture(state, facts)
        if self.parts.world.is_main:
            self.checkpoints.save(state.step, state.best_step, snapshot)
