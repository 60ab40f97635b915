"""One move of the parameters: its learning rate, the gradient's length, whether it may move them, what follows."""

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
    """Move `parameters` by their gradients once a step. `max_norm` is the longest gradient let through, or infinite.

    A step that the guard holds back is counted in `TrainState.skipped` and does not advance the schedule.
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
        """End step `state.step` (from 0), whose mean loss on this rank is `loss`."""
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
        """Give the optimizer the learning rate of the step that `state` is before; return it."""
        lr = self.schedule.lr(state.updates)
        set_lr(self.optimizer.param_groups, lr)
        return lr

    def measure(self) -> Tensor:
        """Bring the gradients to what the optimizer moves; return their norm, float32 [], and shorten them to it."""
        self.precision.weights.collect()
        self.precision.scale.undo([each.grad for each in self.parameters if each.grad is not None])
        return self.strategy.clip(self.parameters, self.max_norm)

    def move(self) -> None:
        """Move the parameters by their gradients, whatever these are."""
        self.optimizer.step()
        self.precision.weights.spread()

    def look(self, step: Step) -> None:
        """Look at a step that has moved the parameters already. Raise `NonFiniteLossError` as the guard does."""
        may_stay = self.guard.passes(step)
        assert may_stay, "a step that may be left out is looked at before it moves anything"

    def settle(self) -> None:
        """Make sure of all steps so far, before the weights are judged or saved."""
        self.guard.settle()
