"""The composition root: a recipe and a world in, a run directory and a result out. Read it top to bottom."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.core.results import EvalResult, RunResult
from paceline.core.rundir import RunDir
from paceline.core.world import World
from paceline.data.sources.build import build_datasets
from paceline.measure import build_clock
from paceline.measure.machine import describe_machine
from paceline.measure.rate import Stopwatch
from paceline.models.trial import check_model
from paceline.parallel.device import choose_device, generators, set_threads
from paceline.parallel.group import Meeting, joined, meeting, once_a_node
from paceline.parallel.strategy import build_strategy
from paceline.recipe.plan import Plan
from paceline.recipe.schema import Recipe
from paceline.train.cadence import Cadence
from paceline.train.checkpoint import Checkpoints, load_model, load_rest
from paceline.train.engine import StepSeed, Trainer
from paceline.train.journal import Journal
from paceline.train.logsink import LogSink, Sinks, build_sinks, build_trace, require_tensorboard
from paceline.train.optim import build_optimizer
from paceline.train.outcome import summarise
from paceline.train.parts import Parts
from paceline.train.resume import check_rundir, finished, open_rundir
from paceline.train.schedule import Schedule, build_schedule
from paceline.train.state import TrainState
from paceline.train.stopping import build_stop_rule


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


def evaluate(recipe: Recipe, world: World, checkpoint: Path) -> EvalResult:
    """Evaluate the weights in `checkpoint` on the validation split of `recipe`, as one rank of `world`."""
    with meeting(world, recipe.parallel) as met, _parts(recipe, met, train_ranks=1) as parts:
        # The training batch need not divide over the ranks that evaluate, so the plan is that of one.
        if recipe.data.eval_batch_size == "auto":
            eval_batch = -(-parts.plan.eval_batch // world.world_size)
            parts = replace(parts, plan=replace(parts.plan, eval_batch=eval_batch))
        model = parts.model()
        load_model(checkpoint, model)
        return parts.evaluator(build_strategy(world, parts.device))(model)


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
    recipe, world, plan = parts.recipe, parts.world, parts.plan

    model = parts.model()
    optimizer = build_optimizer(recipe.optim, model)
    schedule = build_schedule(recipe.schedule, plan)
    checkpoints = Checkpoints(rundir.checkpoints, recipe.checkpoint.keep)
    state = _restored(Path(start_from), model, optimizer, schedule) if start_from else TrainState()
    strategy = build_strategy(world, parts.device)
    replica = strategy.prepare(model)

    machine = describe_machine()
    sinks = _records(parts, rundir, machine, state, invocation)  # what is refused before this leaves nothing behind
    met.share("opened", "yes")  # the others write into the folder that rank 0 has made
    watch = Stopwatch(state.trained_s)
    clock = build_clock(recipe.measure.clock, device_type=parts.device.type, warmup_steps=recipe.measure.warmup_steps)
    trainer = Trainer(
        model=model,
        replica=replica,
        criterion=nn.CrossEntropyLoss(label_smoothing=recipe.train.label_smoothing),
        optimizer=optimizer,
        schedule=schedule,
        precision=parts.precision(),
        strategy=strategy,
        place=parts.placement(),
        loader=parts.train_loader(),
        evaluate=parts.evaluator(strategy),
        save=_Saver(checkpoints, model, optimizer, schedule, parts),
        stop_rule=build_stop_rule(recipe.train.stop),
        clock=clock,
        journal=Journal(
            plan, strategy, schedule, sinks, build_trace(recipe.log, rundir, world.rank, state.step), watch, state
        ),
        seed=StepSeed(recipe.seed, world.rank, generators(parts.device)),
        evaluation=Cadence(plan.eval_every, plan.total_steps),
        saving=Cadence(plan.checkpoint_every, plan.total_steps),
        accumulate=recipe.train.accumulate,
        batch_size=plan.batch_size,
        total_steps=plan.total_steps,
    )
    with contextlib.closing(trainer.journal):
        trainer.fit(state)

    result = summarise(
        parts,
        state,
        model,
        clock.drain(),
        watch,
        status="target_reached" if trainer.stop_rule.reached(state) else "completed",
        startup_s=watch.started_s - invocation.started_s,
        provenance={**machine, "device": parts.device.type, "launcher": world.launcher, "command": invocation.command},
    )
    if world.is_main:
        rundir.write_result(result)
    return result


def _records(parts: Parts, rundir: RunDir, machine: dict[str, Any], state: TrainState, invocation: Invocation) -> Sinks:
    """Write what is known before the first step, and return where the rest goes; rank 0 alone writes."""
    if not parts.world.is_main:
        return Sinks(())
    require_tensorboard(parts.recipe.log)
    open_rundir(rundir, parts.recipe)
    rundir.write_json("plan.json", parts.plan.to_dict())
    rundir.write_json("machine.json", machine)
    sinks = build_sinks(rundir, parts.recipe.log.tensorboard, state.step, invocation.listeners)
    sinks.started(parts.plan, state.step)
    return sinks


def _restored(checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer, schedule: Schedule) -> TrainState:
    load_model(checkpoint, model)
    return load_rest(checkpoint, optimizer, schedule)


@dataclass(frozen=True)
class _Saver:
    """Write a checkpoint from rank 0; the ranks are equal, so the others have nothing to add."""

    checkpoints: Checkpoints
    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    parts: Parts

    def __call__(self, state: TrainState) -> None:
        if self.parts.world.is_main:
            facts = {"recipe_hash": self.parts.recipe.hash, "world_size": self.parts.world.world_size}
            self.checkpoints.save(state, self.model, self.optimizer, self.schedule, facts)
