"""Watch over the numbers: a loss or gradient that is none must not reach the weights unseen.

What is looked at is the norm of the whole gradient, which is the same on every rank: `Precision.backward` makes the
gradients of a bad loss NaN, and averaging carries a NaN to all ranks, so they decide alike without a word; where each
rank trains alone, it is their norms that are averaged. Which rank it came from is asked only then.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

import torch
from torch import Tensor

from paceline.core.errors import NonFiniteLossError
from paceline.core.units import count
from paceline.core.world import World
from paceline.parallel.strategy import Strategy
from paceline.recipe.schema.train import Train
from paceline.train.precision import DynamicScale, Precision, Scale

MAX_SKIPS = 10
"""Skipped steps in a row after which it is not the data: ten batches that share no image were all bad."""
MAX_UNSETTLED = 3
"""The same where weights are about to be judged or saved."""
_FIX = "lower optim.lr, or set train.on_nonfinite=skip"


@dataclass(frozen=True)
class Step:
    """What the guard is told of a step: its number from 1, its learning rate, and tensors [] on the device.

    `loss` is this rank's mean loss, `gradient` whether this rank's own gradient is finite (1 or 0, before it is
    averaged), `norm` what `Strategy.clip` returned, the same on every rank: a guard may call collectives for it.
    `skips` is how many steps just before were skipped.
    """

    number: int
    lr: float
    loss: Tensor
    gradient: Tensor
    norm: Tensor
    skips: int = 0


class Guard(Protocol):
    """Say whether a step may move the weights."""

    def passes(self, step: Step) -> bool:
        """Return whether it may. Raise `NonFiniteLossError` to end the run. Every rank calls it at every step."""
        ...

    def settle(self) -> None:
        """Look at all steps that have not been looked at; a checkpoint is about to be written."""
        ...


@dataclass(frozen=True)
class Reporter:
    """Find out where a bad number came from, and say it in one line. Every rank calls it in the same step."""

    world: World
    strategy: Strategy
    newest_checkpoint: Callable[[], str]

    def error(self, step: Step, last_good: str | None = None, fix: str = _FIX) -> NonFiniteLossError:
        """Return the error for `step`; the last good checkpoint is the newest unless it is known to be another."""
        bad_losses = self.bad_losses(step)
        bad_gradients = self._ranks_where(step.gradient == 0)
        if bad_losses:
            what = f"the loss is no number on {bad_losses}"
        elif bad_gradients:
            what = f"the gradient is no number on {bad_gradients}, though the loss is"
        else:
            what = "the gradient is no number, though the loss is on every rank"
        checkpoint = last_good or self.newest_checkpoint()
        return NonFiniteLossError(
            f"train: step {step.number}: {what}, at lr {step.lr:.4g}; last good checkpoint: {checkpoint} ({fix})"
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


STEPS_AHEAD: Final = 4
"""How far the host may be ahead of a GPU: what it does once in many steps, such as drawing the numbers of the next
samples, takes it longer than a step of a small network."""
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
    """Look at a step when `STEPS_AHEAD` more have been queued, so that the GPU never waits for the host.

    The bad step has then moved the weights, but the run ends before they are judged or saved, and the error names
    the step it was.
    """

    reporter: Reporter
    arrive: Arrive = arrive_from_gpu
    _waiting: deque[tuple[Step, Callable[[], float]]] = field(default_factory=deque)

    def passes(self, step: Step) -> bool:
        """Return True, or raise for a step before."""
        self._waiting.append((step, self.arrive(step.norm)))
        self._look(STEPS_AHEAD)
        return True

    def settle(self) -> None:
        """Look at the steps that are left."""
        self._look(0)

    def _look(self, num_left: int) -> None:
        while len(self._waiting) > num_left:
            step, norm = self._waiting.popleft()
            if not math.isfinite(norm()):
                raise self.reporter.error(step)


@dataclass
class Skip:
    """Leave a bad step out, and end the run when there are too many in a row: then it is the weights that are bad.

    That is `MAX_SKIPS`, or `MAX_UNSETTLED` where the weights are about to be judged or saved.
    """

    reporter: Reporter
    _skipped: Step | None = None
    _last_good: str = "none"

    def passes(self, step: Step) -> bool:
        """Return whether the step is good."""
        if math.isfinite(step.norm.item()):
            self._skipped = None
            return True
        if self._skipped is None:
            self._last_good = self.reporter.newest_checkpoint()
        self._skipped = step
        self._check(MAX_SKIPS)
        return False

    def settle(self) -> None:
        """End the run when the steps just before were all bad."""
        self._check(MAX_UNSETTLED)

    def _check(self, too_many: int) -> None:
        if self._skipped is not None and self._skipped.skips + 1 >= too_many:
            fix = f"{count(self._skipped.skips + 1, 'step')} in a row were skipped: lower optim.lr"
            raise self.reporter.error(self._skipped, self._last_good, fix)


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
