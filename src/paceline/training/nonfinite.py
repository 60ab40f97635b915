"""Detect NaN and infinite losses and gradients, and stop the run or skip the step.

The guard checks the norm of the averaged gradient, which is equal on all ranks: `Precision.backward` turns the
gradients of a non-finite loss into NaN, and averaging carries it to all ranks. So all ranks decide equally without
communication, and only then find out which rank caused it.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

import torch
from torch import Tensor, nn

from paceline.core.errors import NonFiniteLossError
from paceline.core.units import count
from paceline.core.world import World
from paceline.parallel.strategy import Strategy
from paceline.recipe.schema.train import Train
from paceline.training.precision import DynamicLossScaler, Precision


class GradientProbe:
    """Check this rank's gradient of the first trainable layer, to which NaN and infinity propagate; not with FSDP."""

    def __init__(self, model: nn.Module) -> None:
        first = next(parameter for parameter in model.parameters() if parameter.requires_grad)
        self._is_finite = torch.ones((), device=first.device)
        first.register_hook(self._check_gradient)  # type: ignore[no-untyped-call]

    def _check_gradient(self, gradient: Tensor) -> None:
        self._is_finite = self._is_finite * torch.isfinite(gradient.detach()).all()

    def pop_is_finite(self) -> Tensor:
        """Return float32 []: 1 if all gradients since the last call were finite, else 0. Reset the flag."""
        seen = self._is_finite
        self._is_finite = torch.ones_like(seen)
        return seen


class SavedBuffers:
    """Copies of all non-empty buffers, to restore what a forward pass changed, such as BatchNorm's statistics."""

    def __init__(self, model: nn.Module) -> None:
        self._buffers = [buffer for buffer in model.buffers() if buffer.numel()]
        self._saved = [buffer.detach().clone() for buffer in self._buffers]

    @torch.no_grad()
    def save(self) -> None:
        """Save the buffers."""
        if self._saved:
            torch._foreach_copy_(self._saved, self._buffers)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the buffers."""
        if self._saved:
            torch._foreach_copy_(self._buffers, self._saved)


STEPS_AHEAD: Final = 4
"""Steps that the host may be ahead of a GPU: occasional host work takes longer than a step of a small model."""
MAX_SKIPS = 10
"""Skipped steps in a row that end the run: the data cannot be the cause of ten disjoint batches."""
MAX_SKIPS_BEFORE_SAVE = 3
"""The limit before the weights are evaluated or saved."""
_DEFAULT_FIX = "lower optim.lr, or set train.on_nonfinite=skip"


@dataclass(frozen=True)
class StepValues:
    """Values of a step for the guard: step number from 1, learning rate, and tensors [] on the device.

    `loss` is this rank's mean loss, `is_gradient_finite` is 1 if its gradient was finite before averaging, else 0.
    `grad_norm`, from `Strategy.clip`, is equal on all ranks: a guard may call collectives based on it. `skips_in_row`
    counts the steps skipped directly before, except those that lowered the loss scale.
    """

    number: int
    lr: float
    loss: Tensor
    is_gradient_finite: Tensor
    grad_norm: Tensor
    skips_in_row: int = 0


class NonFiniteGuard(Protocol):
    """Decide whether a step may update the weights."""

    def check(self, step: StepValues) -> bool:
        """Return whether it may. Raise `NonFiniteLossError` to end the run. Collective."""
        ...

    def sync(self) -> None:
        """Check all pending steps. A checkpoint is about to be written."""
        ...


@dataclass(frozen=True)
class NonFiniteReporter:
    """Describe a non-finite value and the ranks that caused it. Collective."""

    world: World
    strategy: Strategy
    newest_checkpoint: Callable[[], str]

    def build_error(
        self, step: StepValues, last_good: str | None = None, fix: str = _DEFAULT_FIX
    ) -> NonFiniteLossError:
        """Return the error for `step`; the last good checkpoint is the newest unless given."""
        bad_losses = self.describe_bad_losses(step)
        bad_gradients = self._describe_ranks(step.is_gradient_finite == 0)
        if bad_losses:
            what = f"the loss is NaN or infinite on {bad_losses}"
        elif bad_gradients:
            what = f"the gradient is NaN or infinite on {bad_gradients}, though the loss is finite"
        else:
            what = "the gradient is NaN or infinite, though the loss is finite on every rank"
        checkpoint = last_good or self.newest_checkpoint()
        return NonFiniteLossError(
            f"train: step {step.number}: {what}, at lr {step.lr:.4g}; last good checkpoint: {checkpoint} ({fix})"
        )

    def describe_bad_losses(self, step: StepValues) -> str:
        """Return the ranks with a non-finite loss as text, or an empty string. Collective."""
        return self._describe_ranks(~torch.isfinite(step.loss))

    def _describe_ranks(self, is_so: Tensor) -> str:
        flags = torch.zeros(self.world.world_size, device=is_so.device)
        flags[self.world.rank] = is_so.float()
        ranks = [str(rank) for rank, flag in enumerate(self.strategy.sum(flags).tolist()) if flag]
        if not ranks:
            return ""
        shown = ", ".join(ranks[:4]) + (", ..." if len(ranks) > 4 else "")
        return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown} of {self.world.world_size}"


@dataclass(frozen=True)
class ImmediateCheck:
    """Check every step before its update, and end the run at the first non-finite one."""

    reporter: NonFiniteReporter

    def check(self, step: StepValues) -> bool:
        """Return True, or raise."""
        if not math.isfinite(step.grad_norm.item()):
            raise self.reporter.build_error(step)
        return True

    def sync(self) -> None:
        """Do nothing: every step has been checked."""


CopyToHost = Callable[[Tensor], Callable[[], float]]


def copy_from_gpu(value: Tensor) -> Callable[[], float]:
    """Start copying `value` [] to the host; return a function that waits for this copy only."""
    host = torch.empty_like(value, device="cpu", pin_memory=True).copy_(value, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()

    def wait() -> float:
        event.synchronize()
        return host.item()

    return wait


@dataclass(frozen=True)
class DeferredCheck:
    """Check a step once `STEPS_AHEAD` more are queued, so that the GPU never waits for the host.

    The weights are already updated then, but the run ends before they are evaluated or saved.
    """

    reporter: NonFiniteReporter
    copy_to_host: CopyToHost = copy_from_gpu
    _pending: deque[tuple[StepValues, Callable[[], float]]] = field(default_factory=deque)

    def check(self, step: StepValues) -> bool:
        """Return True, or raise for an earlier step."""
        self._pending.append((step, self.copy_to_host(step.grad_norm)))
        self._check_pending(STEPS_AHEAD)
        return True

    def sync(self) -> None:
        """Check the pending steps."""
        self._check_pending(0)

    def _check_pending(self, num_left: int) -> None:
        while len(self._pending) > num_left:
            step, norm = self._pending.popleft()
            if not math.isfinite(norm()):
                raise self.reporter.build_error(step)


@dataclass
class SkipStep:
    """Skip non-finite steps; end the run after `MAX_SKIPS` in a row (`MAX_SKIPS_BEFORE_SAVE` in `sync`)."""

    reporter: NonFiniteReporter
    _skipped: StepValues | None = None
    _last_good: str = "none"

    def check(self, step: StepValues) -> bool:
        """Return whether the step is finite."""
        if math.isfinite(step.grad_norm.item()):
            self._skipped = None
            return True
        if self._skipped is None:
            self._last_good = self.reporter.newest_checkpoint()
        self._skipped = step
        self._raise_if_too_many(MAX_SKIPS)
        return False

    def sync(self) -> None:
        """End the run if the steps just before were skipped."""
        self._raise_if_too_many(MAX_SKIPS_BEFORE_SAVE)

    def _raise_if_too_many(self, too_many: int) -> None:
        if self._skipped is not None and self._skipped.skips_in_row + 1 >= too_many:
            fix = f"{count(self._skipped.skips_in_row + 1, 'step')} in a row were skipped: lower optim.lr"
            raise self.reporter.build_error(self._skipped, self._last_good, fix)


@dataclass(frozen=True)
class LossScalingGuard:
    """Skip steps whose scaled gradients overflowed while a smaller loss scale may help."""

    scaler: DynamicLossScaler
    reporter: NonFiniteReporter
    inner: NonFiniteGuard

    def check(self, step: StepValues) -> bool:
        """Return whether the gradients are finite, or the decision of `inner` if the loss scale is not the cause."""
        if math.isfinite(step.grad_norm.item()):
            self.scaler.update()
            return self.inner.check(step)
        if not self.reporter.describe_bad_losses(step) and self.scaler.backoff():
            return False
        return self.inner.check(step)

    def sync(self) -> None:
        """Forward to `inner`."""
        self.inner.sync()


def build_nonfinite_guard(
    section: Train, precision: Precision, reporter: NonFiniteReporter, device: torch.device
) -> NonFiniteGuard:
    """Return the guard of `train.on_nonfinite`."""
    scaler = precision.scaler
    guard: NonFiniteGuard
    if section.on_nonfinite == "skip":
        guard = SkipStep(reporter)
    elif device.type == "cuda" and not scaler:  # the others need the result before the update
        guard = DeferredCheck(reporter)
    else:
        guard = ImmediateCheck(reporter)
    return LossScalingGuard(scaler, reporter, guard) if scaler else guard
