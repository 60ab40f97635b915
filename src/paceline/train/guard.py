"""Watch over the numbers: a loss or gradient that is none must not reach the weights unseen.

What is looked at is the norm of the whole gradient, which is the same on every rank: `Precision.backward` makes the
gradients of a bad loss NaN, and averaging carries a NaN to all ranks, so they decide alike without a word. Which rank
it came from is asked only then.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from paceline.core.errors import NonFiniteLossError
from paceline.core.units import count
from paceline.core.world import World
from paceline.parallel.strategy import Strategy
from paceline.recipe.schema.train import Train
from paceline.train.precision import DynamicScale, Precision, Scale

MAX_SKIPS = 100
"""Skipped steps in a row after which nothing can be hoped for."""


@dataclass(frozen=True)
class Step:
    """What the guard is told of a step: its number from 1, its learning rate, and tensors [] on the device.

    `loss` is this rank's mean loss, `gradient` whether this rank's own gradient is finite (1 or 0, before it is
    averaged), `norm` the length of the averaged gradient.
    """

    number: int
    lr: float
    loss: Tensor
    gradient: Tensor
    norm: Tensor


class Guard(Protocol):
    """Say whether a step may move the weights."""

    def passes(self, step: Step) -> bool:
        """Return whether it may. Raise `NonFiniteLossError` to end the run. Every rank calls it at every step."""
        ...

    def settle(self) -> None:
        """Look at all steps that have not been looked at; a checkpoint is about to be written."""
        ...


class Probe:
    """Whether a rank's own gradient is finite, seen where backward ends: at the first layer that learns.

    A NaN or an infinity in a gradient reaches the layers before it, so one small tensor a step tells. Where the
    strategy keeps that tensor to itself, as FSDP does, it stays unseen.
    """

    def __init__(self, model: nn.Module) -> None:
        first = next(parameter for parameter in model.parameters() if parameter.requires_grad)
        self._is_finite = torch.ones((), device=first.device)
        first.register_hook(self._see)  # type: ignore[no-untyped-call]

    def _see(self, gradient: Tensor) -> None:
        self._is_finite = self._is_finite * torch.isfinite(gradient.detach()).all()

    def take(self) -> Tensor:
        """Return float32 [], 1 while all gradients since the last call were finite, else 0."""
        seen = self._is_finite
        self._is_finite = torch.ones_like(seen)
        return seen


@dataclass(frozen=True)
class Reporter:
    """Find out where a bad number came from, and say it in one line. Every rank calls it in the same step."""

    world: World
    strategy: Strategy
    newest_checkpoint: Callable[[], str]

    def error(self, step: Step) -> NonFiniteLossError:
        """Return the error for `step`."""
        bad_losses = self.bad_losses(step)
        bad_gradients = self._ranks_where(step.gradient == 0)
        if bad_losses:
            what = f"the loss is no number on {bad_losses}"
        elif bad_gradients:
            what = f"the gradient is no number on {bad_gradients}, though the loss is"
        else:
            what = "the gradient is no number, though the loss is on every rank"
        return NonFiniteLossError(
            f"train: step {step.number}: {what}, at lr {step.lr:.4g}; last good checkpoint: {self.newest_checkpoint()} "
            f"(lower optim.lr, or set train.on_nonfinite=skip)"
        )

    def bad_losses(self, step: Step) -> str:
        """Return the ranks whose loss is no number in words, or nothing. Every rank calls it in the same step."""
        return self._ranks_where(~torch.isfinite(step.loss))

    def _ranks_where(self, is_so: Tensor) -> str:
        flags = torch.zeros(self.world.world_size, device=is_so.device)
        flags[self.world.rank] = is_so.float()
        ranks = [str(rank) for rank, flag in enumerate(self.strategy.sum(flags).tolist()) if flag]
        if not ranks:
            return ""
        shown = ", ".join(ranks[:4]) + (", ..." if len(ranks) > 4 else "")
        return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown} of {self.world.world_size}"


@dataclass(frozen=True)
class StopAtOnce:
    """Look at every step before it moves anything, and end the run at the first bad one."""

    reporter: Reporter

    def passes(self, step: Step) -> bool:
        """Return True, or raise."""
        if not math.isfinite(step.norm.item()):
            raise self.reporter.error(step)
        return True

    def settle(self) -> None:
        """Do nothing: every step has been looked at."""


Arrive = Callable[[Tensor], Callable[[], float]]


def arrive_from_gpu(value: Tensor) -> Callable[[], float]:
    """Start copying `value` [] to the host; return what waits for it, and for nothing queued after it."""
    host = torch.empty_like(value, device="cpu", pin_memory=True).copy_(value, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()

    def wait() -> float:
        event.synchronize()
        return host.item()

    return wait


@dataclass(frozen=True)
class StopSoon:
    """Look at a step when the next one has been queued, so that the GPU never waits for the host.

    The bad step has then moved the weights, but the run ends before they are judged or saved, and the error names
    the step it was.
    """

    reporter: Reporter
    arrive: Arrive = arrive_from_gpu
    _waiting: deque[tuple[Step, Callable[[], float]]] = field(default_factory=deque)

    def passes(self, step: Step) -> bool:
        """Return True, or raise for the step before."""
        self.settle()
        self._waiting.append((step, self.arrive(step.norm)))
        return True

    def settle(self) -> None:
        """Look at the step that is left."""
        while self._waiting:
            step, norm = self._waiting.popleft()
            if not math.isfinite(norm()):
                raise self.reporter.error(step)


class Undo(Protocol):
    """Take back what a forward pass has left in a model's buffers, such as the running statistics of batch norm."""

    def keep(self) -> None:
        """Remember the buffers after a good step."""
        ...

    def back(self) -> None:
        """Put back what was remembered."""
        ...


class NothingToUndo:
    """For guards that end the run: what the step has left is never used."""

    def keep(self) -> None:
        """Remember nothing."""

    def back(self) -> None:
        """Do nothing."""


class KeptBuffers:
    """A copy of the floating-point buffers, renewed after each good step."""

    def __init__(self, model: nn.Module) -> None:
        self._buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
        self._kept = [buffer.detach().clone() for buffer in self._buffers]

    @torch.no_grad()
    def keep(self) -> None:
        """Copy the buffers."""
        for kept, buffer in zip(self._kept, self._buffers, strict=True):
            kept.copy_(buffer)

    @torch.no_grad()
    def back(self) -> None:
        """Copy them back."""
        for kept, buffer in zip(self._kept, self._buffers, strict=True):
            buffer.copy_(kept)


@dataclass
class Skip:
    """Leave a bad step out, and end the run only when there are too many in a row."""

    reporter: Reporter
    in_a_row: int = 0

    def passes(self, step: Step) -> bool:
        """Return whether the step is good."""
        if math.isfinite(step.norm.item()):
            self.in_a_row = 0
            return True
        self.in_a_row += 1
        if self.in_a_row >= MAX_SKIPS:
            error = self.reporter.error(step)
            raise NonFiniteLossError(f"{error}; {count(MAX_SKIPS, 'step')} in a row were skipped")
        return False

    def settle(self) -> None:
        """Do nothing: every step has been looked at."""


@dataclass(frozen=True)
class Scaled:
    """Let a scaled loss find its scale: gradients that overflowed are left out while a smaller scale may help."""

    scale: Scale
    reporter: Reporter
    inner: Guard

    def passes(self, step: Step) -> bool:
        """Return whether the gradients fit, or what `inner` says where the scale is not to blame."""
        if math.isfinite(step.norm.item()):
            self.scale.fitted()
            return self.inner.passes(step)
        if not self.reporter.bad_losses(step) and self.scale.grew_too_large():
            return False
        return self.inner.passes(step)

    def settle(self) -> None:
        """Pass it on."""
        self.inner.settle()


def build_undo(section: Train, model: nn.Module) -> Undo:
    """Return what undoes a skipped step, where steps are skipped for what their forward pass met."""
    return KeptBuffers(model) if section.on_nonfinite == "skip" else NothingToUndo()


def build_guard(section: Train, precision: Precision, reporter: Reporter, device: torch.device) -> Guard:
    """Return the guard for `train.on_nonfinite`; only stopping on a GPU can do without waiting for every step."""
    is_scaled = isinstance(precision.scale, DynamicScale)
    guard: Guard
    if section.on_nonfinite == "skip":
        guard = Skip(reporter)
    elif device.type == "cuda" and not is_scaled:
        guard = StopSoon(reporter)
    else:
        guard = StopAtOnce(reporter)
    return Scaled(precision.scale, reporter, guard) if is_scaled else guard
