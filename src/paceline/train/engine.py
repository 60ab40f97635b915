"""The training loop. It reads no recipe and builds nothing."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from paceline.core.philox import step_seed
from paceline.core.results import EvalReport, Status
from paceline.data.batch import Batch
from paceline.data.loader import Loader
from paceline.measure import Clock
from paceline.train.cadence import Cadence
from paceline.train.checkpoint import Last
from paceline.train.journal import Journal
from paceline.train.orders import Orders
from paceline.train.schedule import Schedule
from paceline.train.state import TrainState
from paceline.train.step import Step
from paceline.train.stopping import StopRule


class Save(Protocol):
    """Write a checkpoint."""

    def __call__(self, state: TrainState, last: Last = "") -> None:
        """Write `state` and the training state; `last` marks the final checkpoint of the process, and why it is."""
        ...

    def finish(self, state: TrainState, status: Status) -> Status:
        """Wait until all is on disk; return `status`, or `failed` if the final weights were not saved."""
        ...


class Council(Protocol):
    """Agree across ranks on what to do after a step. All methods are collective."""

    def after(self, step: int, batch: Batch) -> Orders:
        """Return the decision after `step` steps, the last of which trained on `batch`."""
        ...

    def leaves(self) -> bool:
        """Return whether any rank was asked to stop."""
        ...

    def conclude(self) -> None:
        """Exchange pending bad-image reports across ranks."""
        ...


class Evaluate(Protocol):
    """Evaluate the model."""

    def __call__(self, model: nn.Module) -> EvalReport | None:
        """Return the report on `model`, or None if a rank has to stop before it is complete. Collective."""
        ...


@dataclass(frozen=True)
class StepSeed:
    """Seed the random generators of this rank per step, so that no generator state has to be saved."""

    seed: int
    rank: int
    generators: tuple[torch.Generator, ...]

    def at(self, step: int) -> None:
        """Seed the generators for global step `step`."""
        # Not `torch.manual_seed`: without CUDA it formats a stack trace, which takes half a millisecond per step.
        seed = step_seed(self.seed, step, self.rank)
        for generator in self.generators:
            generator.manual_seed(seed)


@dataclass(frozen=True)
class Trainer:
    """The training loop around `model`.

    `saves` says whether to save at the end of the run even if `saving` is never due; a preempted run is always saved.
    """

    model: nn.Module
    step: Step
    schedule: Schedule
    loader: Loader
    evaluate: Evaluate
    save: Save
    council: Council
    stop_rule: StopRule
    clock: Clock
    journal: Journal
    seed: StepSeed
    evaluation: Cadence
    saving: Cadence
    saves: bool
    batch_size: int
    total_steps: int

    def fit(self, state: TrainState) -> Status:
        """Train from `state` to the last step, until the stop rule is met, or until the run is preempted.

        Return how the run ended. `failed`, for final weights that were not saved, is known to rank 0 only.
        """
        # A process that was preempted during an evaluation saved before it, so the evaluation comes first.
        if 0 < state.step != state.last_step and self.evaluation.due(state.step):
            if not self.judge(state):
                return "preempted"  # the checkpoint is still valid
            if self.saves and (state.step == self.total_steps or self.stop_rule.reached(state)):
                self.keep(state, "ended")
        interrupted = False
        last_step = state.step if self.stop_rule.reached(state) else self.total_steps
        for batch in self.clock.batches(self.loader.batches(state.step, last_step)):
            loss = self.train_step(batch, state)
            with self.clock.stage("other"):
                self.journal.step(state, batch, loss)
                state.advance(self.batch_size)
                decision = self.council.after(state.step, batch)
            self.clock.end_step(self.batch_size)
            evaluates = self.evaluation.due(state.step)
            interrupted = decision.leave or (evaluates and not self.judge(state))
            is_last = state.step == self.total_steps or self.stop_rule.reached(state)
            # A stop request that arrived during a completed evaluation must not wait for another step.
            interrupted = interrupted or (evaluates and not is_last and self.council.leaves())
            finished = interrupted or is_last
            if self.saving.due(state.step) or decision.save or interrupted or (finished and self.saves):
                self.keep(state, ("preempted" if interrupted else "ended") if finished else "")
            if finished:
                break
        self.step.settle()
        self.council.conclude()
        reached: Status = "target_reached" if self.stop_rule.reached(state) else "completed"
        status: Status = "preempted" if interrupted else reached
        with self.clock.paused("checkpoint"):
            return self.save.finish(state, status)

    def train_step(self, batch: Batch, state: TrainState) -> Tensor:
        """Run one optimizer step; return the mean loss of this rank's images, on the device."""
        self.seed.at(state.step)
        return self.step(batch, state)

    def keep(self, state: TrainState, last: Last = "") -> None:
        """Save a checkpoint; `last` marks the final one of this process."""
        with self.clock.paused("checkpoint"):
            self.step.settle()
            self.council.conclude()
            with self.journal.paused():  # only now: the queued steps have finished
                self.journal.settle(state)
                self.save(state, last)

    def judge(self, state: TrainState) -> bool:
        """Evaluate, and update schedule and stop rule; return False if the run is preempted meanwhile."""
        with self.clock.paused("evaluate"):
            self.step.settle()
            self.council.conclude()  # no communication may be pending while loader workers are forked
            with self.journal.paused():
                report = self.evaluate(self.model)
                if report is None:
                    return False
                state.evaluated(report)
                self.schedule.observe(report.judged.loss, state.updates)
                self.journal.evaluated(state)
                self.stop_rule.judge(report.judged, state)
        return True
