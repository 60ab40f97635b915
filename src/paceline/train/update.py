"""Update the parameters: learning rate, clipping, non-finite check, optimizer step, weight average."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.parallel.strategy import Strategy
from paceline.train.average import Average
from paceline.train.guard import Guard, Step
from paceline.train.optim import set_lr
from paceline.train.precision import Precision
from paceline.train.probe import Probe
from paceline.train.schedule import Schedule
from paceline.train.state import TrainState
from paceline.train.undo import Undo


@dataclass(frozen=True)
class Update:
    """Update `parameters` once per step. `max_norm` is the clipping threshold, or infinite.

    A step that the guard rejects counts as `TrainState.skipped` and does not advance the schedule.
    """

    parameters: Sequence[nn.Parameter]
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    precision: Precision
    strategy: Strategy
    guard: Guard
    undo: Undo
    probe: Probe
    average: Average
    max_norm: float

    def __call__(self, state: TrainState, loss: Tensor) -> None:
        """Finish step `state.step` (from 0) with mean loss `loss` on this rank."""
        lr = self.set_lr(state)
        norm = self.measure()
        if self.guard.passes(Step(state.step + 1, lr, loss, self.probe.take(), norm, state.skips_in_row)):
            self.move()
            self.average.update(state.step)
            self.undo.keep()
            state.skips_in_row = 0
        else:
            state.skipped += 1
            state.skips_in_row += 1
            self.undo.back()
        self.optimizer.zero_grad(set_to_none=True)

    def set_lr(self, state: TrainState) -> float:
        """Set the learning rate of the next step, and return it."""
        lr = self.schedule.lr(state.updates)
        set_lr(self.optimizer.param_groups, lr)
        return lr

    def measure(self) -> Tensor:
        """Unscale and clip the gradients; return their norm before clipping, float32 []."""
        self.precision.weights.collect()
        self.precision.scale.undo([each.grad for each in self.parameters if each.grad is not None])
        return self.strategy.clip(self.parameters, self.max_norm)

    def move(self) -> None:
        """Run the optimizer step unconditionally."""
        self.optimizer.step()
        self.precision.weights.spread()

    def look(self, step: Step) -> None:
        """Check a step after its update. Raise `NonFiniteLossError` as the guard does."""
        is_accepted = self.guard.passes(step)
        assert is_accepted, "a guard that skips steps must check them before the update"

    def settle(self) -> None:
        """Check all steps so far."""
        self.guard.settle()
