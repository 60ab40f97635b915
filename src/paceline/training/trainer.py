"""The training loop, with evaluations and checkpoints between optimizer steps. It reads no recipe."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.core.metric import Monitor
from paceline.core.random import step_seed
from paceline.core.results import Status
from paceline.core.stages import WEIGH
from paceline.core.statistics import Patience, TargetCriterion
from paceline.data.augment.build import DeviceTransforms
from paceline.data.batch import Batch
from paceline.data.loaders.build import Loader
from paceline.data.transfer import DeviceTransfer
from paceline.measure import Clock
from paceline.parallel.strategy import Strategy
from paceline.training.checkpoint import FinalSave
from paceline.training.clipping import AdaptiveClip
from paceline.training.coordinator import StepCoordinator, StepDecision
from paceline.training.ema import WeightAverage
from paceline.training.evaluator import ModelEvaluator
from paceline.training.hard_images import ImageWeigher
from paceline.training.lr_schedule import LrSchedule
from paceline.training.metrics_logger import BatchAccuracy, MetricsLogger
from paceline.training.nonfinite import GradientProbe, NonFiniteGuard, SavedBuffers, StepValues
from paceline.training.optim.build import set_lr
from paceline.training.pause_log import LogPause
from paceline.training.precision import Precision
from paceline.training.saver import CheckpointSaver
from paceline.training.state import StepInterval, TrainState


@dataclass(frozen=True)
class OptimizerUpdate:
    """Update `parameters` once per step. `max_norm` is the clipping threshold, or infinite.

    A step that the guard rejects counts as `TrainState.skipped` and does not advance the schedule.
    """

    parameters: Sequence[nn.Parameter]
    optimizer: torch.optim.Optimizer
    schedule: LrSchedule
    precision: Precision
    strategy: Strategy
    guard: NonFiniteGuard
    rollback: SavedBuffers | None
    probe: GradientProbe
    average: WeightAverage | None
    max_norm: float
    adaptive_clip: AdaptiveClip | None = None

    def __call__(self, state: TrainState, loss: Tensor) -> None:
        """Finish step `state.step` (from 0) with mean loss `loss` on this rank."""
        # Clip before the check: the norm tells all ranks of a non-finite gradient.
        lr = self.set_lr(state)
        norm = self.prepare_gradients()
        scale = self.loss_scale
        if self.guard.check(StepValues(state.step + 1, lr, loss, self.probe.pop_is_finite(), norm, state.skips_in_row)):
            self.step_optimizer()
            if self.average:
                self.average.update(state.step)
            if self.rollback:
                self.rollback.save()
            state.skips_in_row = 0
        else:
            state.skipped += 1
            # A step that lowered the loss scale says nothing about the data or the learning rate.
            state.skips_in_row += self.loss_scale == scale
            if self.rollback:
                self.rollback.restore()
        self.optimizer.zero_grad(set_to_none=True)

    @property
    def loss_scale(self) -> float:
        """The scale of the loss, 1 without loss scaling."""
        return self.precision.scaler.value if self.precision.scaler else 1.0

    def set_lr(self, state: TrainState) -> float:
        """Set the learning rate of the next step, and return it."""
        lr = self.schedule.lr(state.num_updates)
        set_lr(self.optimizer.param_groups, lr)
        return lr

    def prepare_gradients(self) -> Tensor:
        """Unscale and clip the gradients; return their norm before clipping, float32 []."""
        if self.precision.master:
            self.precision.master.copy_grads()
        if self.precision.scaler:
            self.precision.scaler.unscale([each.grad for each in self.parameters if each.grad is not None])
        norm = self.strategy.clip(self.parameters, self.max_norm)
        if self.adaptive_clip:
            self.adaptive_clip()
        return norm

    def step_optimizer(self) -> None:
        """Run the optimizer step unconditionally."""
        self.optimizer.step()
        if self.precision.master:
            self.precision.master.copy_to_model()


Criterion = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Return the loss [] of logits [N, C], targets (classes int64 [N], or float [N, C]), and normalized images."""


@dataclass(frozen=True)
class EagerStep:
    """An eager step; `replica` is from `Strategy.prepare`."""

    replica: nn.Module
    criterion: Criterion
    precision: Precision
    strategy: Strategy
    transfer: DeviceTransfer
    transforms: DeviceTransforms
    update: OptimizerUpdate
    clock: Clock
    accumulate: int
    accuracy: BatchAccuracy | None

    def __call__(self, batch: Batch, state: TrainState) -> Tensor:
        """Run a step with seeded generators; return this rank's mean loss [] on the device."""
        loss = self.forward_backward(batch)
        with self.clock.stage("optimizer"):
            self.update(state, loss)
        return loss

    def forward_backward(self, batch: Batch) -> Tensor:
        """Accumulate the gradients of `batch` over its micro-batches; return the mean loss []."""
        clock = self.clock
        losses = []
        for number, micro_batch in enumerate(batch.split(self.accumulate), start=1):
            with self.strategy.accumulate(final=number == self.accumulate):
                with clock.stage("h2d"):
                    placed = self.transfer(micro_batch)
                with clock.stage("device_augment"):
                    images, targets = self.transforms(placed)
                with self.precision.autocast():
                    with clock.stage("forward"):
                        logits = self.replica(images)
                    with clock.stage("loss"):
                        loss = self.criterion(logits, targets, images) / self.accumulate
                        if self.accuracy:
                            self.accuracy.add(logits, targets)
                with clock.stage("backward"):
                    self.precision.backward(loss)
            losses.append(loss.detach())
        return torch.stack(losses).sum()


TrainStep = Callable[[Batch, TrainState], Tensor]
"""Run one optimizer step, as `EagerStep`."""
CaptureStep = Callable[[EagerStep, Callable[[str], None]], TrainStep]
"""Return a step that replays captured work; the second argument reports a failed capture."""


@dataclass(frozen=True)
class StepSeeder:
    """Seed this rank's generators per step, so that checkpoints need no generator state."""

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
    """The training loop around `model`. With `saves_at_end` it saves at the end even if `save_every` is not due.

    `record_inputs` receives the first batch of the run, before its step.
    """

    model: nn.Module
    step: TrainStep
    guard: NonFiniteGuard
    schedule: LrSchedule
    loader: Loader
    weigher: ImageWeigher | None
    record_inputs: Callable[[Batch], None]
    log_pause: LogPause
    evaluate_model: ModelEvaluator
    save_state: CheckpointSaver
    coordinator: StepCoordinator
    target: TargetCriterion | None
    patience: Patience
    monitor: Monitor
    plateau_metric: Monitor
    has_max_time: bool
    clock: Clock
    logger: MetricsLogger
    seeder: StepSeeder
    eval_every: StepInterval
    save_every: StepInterval
    saves_at_end: bool
    batch_size: int
    total_steps: int

    def fit(self, state: TrainState) -> Status:
        """Train from `state` to the last step, until the run has a reason to end early, or until it is preempted.

        Return how the run ended; `failed`, for final weights that were not saved, on rank 0 only.
        """
        # A process that was preempted during an evaluation saved before it, so the evaluation comes first.
        if 0 < state.step != state.last_step and self.eval_every.is_due(state.step):
            if not self.evaluate(state):
                return "preempted"  # the checkpoint is still valid
            if self.saves_at_end and self.is_at_end(state):
                self.save_checkpoint(state, "ended")
        interrupted = False
        is_over = self.is_at_end(state) or (self.has_max_time and state.step > 0 and self.coordinator.was_time_up())
        if not (is_over or self.weigh_images(state)):
            return "preempted"
        last_step = state.step if is_over else self.total_steps
        for batch in self.batches(state.step, last_step):
            if state.step == 0:
                self.record_inputs(batch)
            loss = self.train_step(batch, state)
            with self.clock.stage("other"):
                self.logger.log_step(state, batch, loss)
                state.advance(self.batch_size)
                decision = self.coordinator.poll(state.step, batch)  # all ranks: save? stop?
            self.clock.end_step(self.batch_size)
            interrupted = decision.stop or not self.evaluate_after_step(state)
            # A run whose time is up weighs images when it is resumed with more time.
            interrupted = interrupted or not (decision.is_time_up or self.weigh_images(state))
            finished = interrupted or decision.is_time_up or self.is_at_end(state)
            if self.should_save(state, decision, interrupted=interrupted, finished=finished):
                # A run whose time is up may be continued, as a preempted one, so that weights alone are not enough.
                may_continue = interrupted or not self.is_at_end(state)
                self.save_checkpoint(state, ("preempted" if may_continue else "ended") if finished else "")
            if finished:
                break
        self.guard.sync()
        self.coordinator.flush()
        status: Status = "preempted" if interrupted else self.reason_to_end(state) or "time_reached"
        # After the checkpoint: a run that is resumed with more time has not seen this evaluation.
        if status == "time_reached" and not self.evaluate_outside_schedule(state):
            status = "preempted"
        with self.clock.paused("checkpoint"), self.log_pause("checkpoint", state.step):
            return self.save_state.finish(state, status)

    def batches(self, first: int, stop: int) -> Iterator[Batch]:
        """Yield the batches of steps `first` to `stop` - 1; once images are weighed anew, by a new iterator."""
        for steps in self.weigher.split(first, stop) if self.weigher else [range(first, stop)]:
            yield from self.clock.batches(self.loader.batches(steps.start, steps.stop))

    def train_step(self, batch: Batch, state: TrainState) -> Tensor:
        """Seed the generators and run one optimizer step; return this rank's mean loss, on the device."""
        self.seeder.seed_step(state.step)
        return self.step(batch, state)

    def is_at_end(self, state: TrainState) -> bool:
        """Return whether the run ends in `state`, whatever the time."""
        return self.reason_to_end(state) is not None

    def reason_to_end(self, state: TrainState) -> Status | None:
        """Return why the run ends in `state`, or None if it does not or if only its time is up."""
        if self.target is not None and self.target.is_reached(state.hits):
            return "target_reached"
        if state.step == self.total_steps:
            return "completed"
        if self.schedule.has_diverged:
            return "diverged"
        is_exhausted = self.patience.is_exhausted(state.not_better, state.last_step - state.best_step)
        return "patience_reached" if is_exhausted else None

    def should_save(self, state: TrainState, decision: StepDecision, *, interrupted: bool, finished: bool) -> bool:
        """Return whether to save after this step; a run that may be continued, as it is not at its end, always is."""
        is_due = self.save_every.is_due(state.step) or decision.save
        return is_due or interrupted or (finished and (self.saves_at_end or not self.is_at_end(state)))

    def save_checkpoint(self, state: TrainState, final: FinalSave = "") -> None:
        """Save a checkpoint; `final` marks the final one of this process."""
        with self.clock.paused("checkpoint"), self.log_pause("checkpoint", state.step):
            self.guard.sync()  # a non-finite step must end the run before its weights are saved
            self.coordinator.flush()
            with self.logger.paused():  # only now: the queued steps have finished
                self.logger.write_to_state(state)
                self.save_state(state, final)

    def evaluate(self, state: TrainState) -> bool:
        """Evaluate, and update the schedule; return False if the run is preempted meanwhile."""
        with self.clock.paused("evaluate"), self.log_pause("evaluate", state.step):
            self.guard.sync()
            self.coordinator.flush()  # no communication may be pending while loader workers are forked
            with self.logger.paused():
                report = self.evaluate_model(self.model)
                if report is None:
                    return False
                state.record_evaluation(report, self.monitor)
                self.schedule.observe(self.plateau_metric.value(report.primary), state.num_updates)
                self.logger.log_evaluation(state)
                if self.target:
                    state.count_hits(self.target)
        return True

    def evaluate_outside_schedule(self, state: TrainState) -> bool:
        """Evaluate and log weights that were not evaluated yet, only for the result; return False if preempted."""
        if not self.eval_every.every or state.last_step == state.step:
            return True
        with self.clock.paused("evaluate"), self.log_pause("evaluate", state.step), self.logger.paused():
            report = self.evaluate_model(self.model)
            if report is not None:
                state.last, state.last_step = report, state.step
                self.logger.log_evaluation(state)
        return report is not None

    def evaluate_after_step(self, state: TrainState) -> bool:
        """Evaluate if due; return False if the run is preempted during the evaluation or right after it."""
        if not self.eval_every.is_due(state.step):
            return True
        # A stop request that arrived during a completed evaluation must not wait for another step.
        return self.evaluate(state) and (self.is_at_end(state) or not self.coordinator.is_stop_requested())

    def weigh_images(self, state: TrainState) -> bool:
        """Weigh the training images if due; return False if the run is preempted meanwhile or right after it."""
        if self.weigher is None or not self.weigher.is_due(state.step) or self.is_at_end(state):
            return True
        with self.clock.paused("evaluate"), self.log_pause(WEIGH, state.step):
            self.guard.sync()
            self.coordinator.flush()
            with self.logger.paused():
                is_complete = self.weigher(self.model, state.step)
        return is_complete and not self.coordinator.is_stop_requested()
