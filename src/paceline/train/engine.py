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
from paceline.train.cadence import StepInterval
from paceline.train.checkpoint import FinalSave
from paceline.train.journal import MetricsLogger
from paceline.train.orders import StepDecision
from paceline.train.schedule import LrSchedule
from paceline.train.state import TrainState
from paceline.train.step import TrainStep
from paceline.train.stopping import StopRule


class SaveCheckpoint(Protocol):
    """Write a checkpoint."""

    def __call__(self, state: TrainState, final: FinalSave = "") -> None:
        """Write `state` and the training state; `final` marks the final checkpoint of the process, and why it is."""
        ...

    def finish(self, state: TrainState, status: Status) -> Status:
        """Wait until all is on disk; return `status`, or `failed` if the final weights were not saved."""
        ...


class Coordinator(Protocol):
    """Agree across ranks on what to do after a step. All methods are collective."""

    def poll(self, step: int, batch: Batch) -> StepDecision:
        """Return the decision after `step` steps, the last of which trained on `batch`."""
        ...

    def is_stop_requested(self) -> bool:
        """Return whether any rank was asked to stop."""
        ...

    def flush(self) -> None:
        """Exchange pending bad-image reports across ranks."""
        ...


class EvaluateModel(Protocol):
    """Evaluate the model."""

    def __call__(self, model: nn.Module) -> EvalReport | None:
        """Return the report on `model`, or None if a rank has to stop before it is complete. Collective."""
        ...


@dataclass(frozen=True)
class StepSeeder:
    """Seed the random generators of this rank per step, so that no generator state has to be saved."""

    seed: int
    rank: int
    generators: tuple[torch.Generator, ...]

    def seed_step(self, step: int) -> None:
        """Seed the generators for global step `step`."""
        # Not `torch.manual_seed`: without CUDA it formats a stack trace, which takes half a millisecond per step.
        seed = step_seed(self.seed, step, self.rank)
        for generator in self.generators:
            generator.manual_seed(seed)


@dataclass(frozen=True)
class Trainer:
    """The training loop around `model`.

    `saves_at_end` says whether to save at the end of the run even if `save_every` is never due; a preempted run is always saved.
    """

    model: nn.Module
    step: TrainStep
    schedule: LrSchedule
    loader: Loader
    evaluate_model: EvaluateModel
    save_state: SaveCheckpoint
    coordinator: Coordinator
    stopping: StopRule
    clock: Clock
    logger: MetricsLogger
    seeder: StepSeeder
    eval_every: StepInterval
    save_every: StepInterval
    saves_at_end: bool
    batch_size: int
    total_steps: int

    def fit(self, state: TrainState) -> Status:
        """Train from `state` to the last step, until the stop rule is met, or until the run is preempted.

        Return how the run ended. `failed`, for final weights that were not saved, is known to rank 0 only.
        """
        # A process that was preempted during an evaluation saved before it, so the evaluation comes first.
        if 0 < state.step != state.last_step and self.eval_every.is_due(state.step):
            if not self.evaluate(state):
                return "preempted"  # the checkpoint is still valid
            if self.saves_at_end and (state.step == self.total_steps or self.stopping.is_met(state)):
                self.save_checkpoint(state, "ended")
        interrupted = False
        last_step = state.step if self.stopping.is_met(state) else self.total_steps
        for batch in self.clock.batches(self.loader.batches(state.step, last_step)):
            loss = self.train_step(batch, state)
            with self.clock.stage("other"):
                self.logger.log_step(state, batch, loss)
                state.advance(self.batch_size)
                decision = self.coordinator.poll(state.step, batch)
            self.clock.end_step(self.batch_size)
            evaluates = self.eval_every.is_due(state.step)
            interrupted = decision.stop or (evaluates and not self.evaluate(state))
            is_last = state.step == self.total_steps or self.stopping.is_met(state)
            # A stop request that arrived during a completed evaluation must not wait for another step.
            interrupted = interrupted or (evaluates and not is_last and self.coordinator.is_stop_requested())
            finished = interrupted or is_last
            if self.save_every.is_due(state.step) or decision.save or interrupted or (finished and self.saves_at_end):
                self.save_checkpoint(state, ("preempted" if interrupted else "ended") if finished else "")
            if finished:
                break
        self.step.sync()
        self.coordinator.flush()
        reached: Status = "target_reached" if self.stopping.is_met(state) else "completed"
        status: Status = "preempted" if interrupted else reached
        with self.clock.paused("checkpoint"):
            return self.save_state.finish(state, status)

    def train_step(self, batch: Batch, state: TrainState) -> Tensor:
        """Run one optimizer step; return the mean loss of this rank's images, on the device."""
        self.seeder.seed_step(state.step)
        return self.step(batch, state)

    def save_checkpoint(self, state: TrainState, final: FinalSave = "") -> None:
        """Save a checkpoint; `final` marks the final one of this process."""
        with self.clock.paused("checkpoint"):
            self.step.sync()
            self.coordinator.flush()
            with self.logger.paused():  # only now: the queued steps have finished
                self.logger.write_to_state(state)
                self.save_state(state, final)

    def evaluate(self, state: TrainState) -> bool:
        """Evaluate, and update schedule and stop rule; return False if the run is preempted meanwhile."""
        with self.clock.paused("evaluate"):
            self.step.sync()
            self.coordinator.flush()  # no communication may be pending while loader workers are forked
            with self.logger.paused():
                report = self.evaluate_model(self.model)
                if report is None:
                    return False
                state.record_evaluation(report)
                self.schedule.observe(report.primary.loss, state.num_updates)
                self.logger.log_evaluation(state)
                self.stopping.update(report.primary, state)
        return True
