"""Update the parameters: learning rate, clipping, non-finite check, optimizer step, weight average."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.parallel.strategy import Strategy
from paceline.train.average import WeightAverage
from paceline.train.guard import NonFiniteGuard, StepValues
from paceline.train.optim import set_lr
from paceline.train.precision import Precision
from paceline.train.probe import GradientProbe
from paceline.train.schedule import LrSchedule
from paceline.train.state import TrainState
from paceline.train.undo import BufferRollback


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
    rollback: BufferRollback
    probe: GradientProbe
    average: WeightAverage
    max_norm: float

    def __call__(self, state: TrainState, loss: Tensor) -> None:
        """Finish step `state.step` (from 0) with mean loss `loss` on this rank."""
        lr = self.set_lr(state)
        norm = self.prepare_gradients()
        if self.guard.check(StepValues(state.step + 1, lr, loss, self.probe.pop_is_finite(), norm, state.skips_in_row)):
            self.step_optimizer()
            self.average.update(state.step)
            self.rollback.save()
            state.skips_in_row = 0
        else:
            state.skipped += 1
            state.skips_in_row += 1
            self.rollback.restore()
        self.optimizer.zero_grad(set_to_none=True)

    def set_lr(self, state: TrainState) -> float:
        """Set the learning rate of the next step, and return it."""
        lr = self.schedule.lr(state.num_updates)
        set_lr(self.optimizer.param_groups, lr)
        return lr

    def prepare_gradients(self) -> Tensor:
        """Unscale and clip the gradients; return their norm before clipping, float32 []."""
        self.precision.weights.copy_grads_to_master()
        self.precision.scale.unscale([each.grad for each in self.parameters if each.grad is not None])
        return self.strategy.clip(self.parameters, self.max_norm)

    def step_optimizer(self) -> None:
        """Run the optimizer step unconditionally."""
        self.optimizer.step()
        self.precision.weights.copy_master_to_model()

    def check_after_step(self, step: StepValues) -> None:
        """Check a step after its update. Raise `NonFiniteLossError` as the guard does."""
        is_accepted = self.guard.check(step)
        assert is_accepted, "a guard that skips steps must check them before the update"

    def sync(self) -> None:
        """Check all steps so far."""
        self.guard.sync()
