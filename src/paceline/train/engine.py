"""The training loop. It runs the parts it is given, in order; it reads no recipe and builds nothing."""

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
        """Write `state` and all that goes with it; `last` says that the process saves nothing more, and why."""
        ...

    def finish(self, state: TrainState, status: Status) -> Status:
        """Wait until all is on disk; return `status`, or `failed` where the final weights are not."""
        ...


class Council(Protocol):
    """Let the ranks agree on what to do beside the next step."""

    def after(self, step: int, batch: Batch) -> Orders:
        """Return what is to be done after `step` steps, the last of them on `batch`; every rank must call it."""
        ...

    def leaves(self) -> bool:
        """Return whether any rank has been asked to leave by now; every rank must call it."""
        ...

    def conclude(self) -> None:
        """Take in what the ranks met in the last step; every rank must call it."""
        ...


class Evaluate(Protocol):
    """Judge the model."""

    def __call__(self, model: nn.Module) -> EvalReport | None:
        """Return what the model is worth, or None when the ranks leave before it is known; every rank must call it."""
        ...


@dataclass(frozen=True)
class StepSeed:
    """Seed what a rank draws inside a step, so that no generator's state has to be carried from step to step.

    The generators are seeded one by one: `torch.manual_seed` formats a stack trace where CUDA is not initialised,
    half a millisecond a step.
    """

    seed: int
    rank: int
    generators: tuple[torch.Generator, ...]

    def at(self, step: int) -> None:
        """Seed the generators for global step `step`."""
        seed = step_seed(self.seed, step, self.rank)
        for generator in self.generators:
            generator.manual_seed(seed)


@dataclass(frozen=True)
class Trainer:
    """Everything a run needs to train `model`: `step` moves it, the others surround that.

    `saves` says that the run is saved at its end, whether or not `saving` is ever due; where it leaves, it always is.
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
        """Train from `state` to the last step, to that at which the stopping rule is met, or until the ranks leave.

        Return how it ended; that the final weights could not be saved, which is `failed`, only rank 0 knows.

        A process that left in the middle of an evaluation had saved before it, so it comes first.
        """
        if 0 < state.step != state.last_step and self.evaluation.due(state.step):
            if not self.judge(state):
                return "preempted"  # as it was saved
            if self.saves and (state.step == self.total_steps or self.stop_rule.reached(state)):
                self.keep(state, "ended")
        leaves = False
        stop = state.step if self.stop_rule.reached(state) else self.total_steps
        for batch in self.clock.batches(self.loader.batches(state.step, stop)):
            loss = self.train_step(batch, state)
            with self.clock.stage("other"):
                self.journal.step(state, batch, loss)
                state.advance(self.batch_size)
                orders = self.council.after(state.step, batch)
            self.clock.end_step(self.batch_size)
            is_judged = self.evaluation.due(state.step)
            leaves = orders.leave or (is_judged and not self.judge(state))
            is_last = state.step == self.total_steps or self.stop_rule.reached(state)
            # A request during an evaluation that was finished all the same is not to wait for another step.
            leaves = leaves or (is_judged and not is_last and self.council.leaves())
            done = leaves or is_last
            if self.saving.due(state.step) or orders.save or leaves or (done and self.saves):
                self.keep(state, ("preempted" if leaves else "ended") if done else "")
            if done:
                break
        self.step.settle()
        self.council.conclude()
        reached: Status = "target_reached" if self.stop_rule.reached(state) else "completed"
        status: Status = "preempted" if leaves else reached
        with self.clock.paused("checkpoint"):
            return self.save.finish(state, status)

    def train_step(self, batch: Batch, state: TrainState) -> Tensor:
        """Move the model by one optimizer step; return the mean loss of this rank's images, on the device."""
        self.seed.at(state.step)
        return self.step(batch, state)

    def keep(self, state: TrainState, last: Last = "") -> None:
        """Save what makes the next step what it would be; `last` where no step of this process follows."""
        with self.clock.paused("checkpoint"):
            self.step.settle()
            self.council.conclude()
            with self.journal.paused():  # from here on: what steps have queued was waited for
                self.journal.settle(state)
                self.save(state, last)

    def judge(self, state: TrainState) -> bool:
        """Evaluate, and let the schedule and the stopping rule know; return False when the ranks leave before."""
        with self.clock.paused("evaluate"):
            self.step.settle()
            self.council.conclude()  # nothing is under way while loader workers are forked
            with self.journal.paused():
                report = self.evaluate(self.model)
                if report is None:
                    return False
                state.evaluated(report)
                self.schedule.observe(report.judged.loss, state.updates)
                self.journal.evaluated(state)
                self.stop_rule.judge(report.judged, state)
        return True
