"""Learning-rate schedules. All but `Plateau` and `RangeTest` are pure functions of the step."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Literal

from paceline.recipe.plan import Plan
from paceline.recipe.schema import optim as sections
from paceline.recipe.schema.optim import ScheduleSection

_LOSS_DECAY: Final = 0.9
"""Decay of the average that ends a range test; the suggestion smooths the losses anew (`lab.lr_find`)."""
LrShape = Callable[[int], float]
"""Return the learning rate at a global step, from 0, relative to its peak, without the warm-up."""


@dataclass(frozen=True)
class DecayShape:
    """Decay from the peak at step `first` to `final` at step `last` along `curve`, from 1 to 0 on [0, 1]."""

    first: int
    last: int
    final: float
    curve: Callable[[float], float]

    def __call__(self, step: int) -> float:
        """Return the share of the peak at `step`."""
        progress = min(1.0, max(0.0, (step - self.first) / max(1, self.last - self.first)))
        return self.final + (1.0 - self.final) * self.curve(progress)


def half_cosine(progress: float) -> float:
    """Return (1 + cos(pi t)) / 2 (Loshchilov and Hutter 2017, arXiv 1608.03983)."""
    return (1 + math.cos(math.pi * progress)) / 2


def power_curve(power: float) -> Callable[[float], float]:
    """Return the curve (1 - t) ** power."""
    return lambda progress: (1 - progress) ** power


@dataclass(frozen=True)
class MilestoneShape:
    """Multiply by `factor` at each step of `steps`."""

    steps: tuple[int, ...]
    factor: float

    def __call__(self, step: int) -> float:
        """Return the share of the peak at `step`."""
        return self.factor ** sum(step >= milestone for milestone in self.steps)


@dataclass(frozen=True)
class OneCycleShape:
    """Rise from `start` to the peak at step `peak_at`, then fall to `final` at the last step, both along a cosine."""

    peak_at: int
    last: int
    start: float
    final: float

    def __call__(self, step: int) -> float:
        """Return the share of the peak at `step`."""
        if step < self.peak_at:
            return self.start + (1.0 - self.start) * half_cosine(1 - step / self.peak_at)
        return DecayShape(self.peak_at, self.last, self.final, half_cosine)(step)


@dataclass(frozen=True)
class LrWarmup:
    """Warm-up from `start` times the peak over `steps` steps (Goyal et al. 2017, arXiv 1706.02677, section 2.2).

    With `epoch_steps`, the number of steps per epoch, the rate changes once per epoch: from `start` to the peak after
    the warm-up, as torch's LinearLR stepped per epoch, or, if `start` is 0, in n equal stairs from 1/n.
    """

    steps: int
    start: float
    shape: Literal["linear", "exponential", "constant"] = "linear"
    epoch_steps: int = 0

    def share(self, step: int) -> float:
        """Return the share of the peak at global step `step`."""
        if step >= self.steps:
            return 1.0
        match self.shape:
            case "linear":
                return self.start + (1.0 - self.start) * self._progress(step)
            case "exponential":
                return math.pow(self.start, 1 - self._progress(step))
            case "constant":
                return self.start

    def _progress(self, step: int) -> float:
        if not self.epoch_steps:
            return (step + 1) / self.steps
        epoch = step // self.epoch_steps
        return (epoch if self.start else epoch + 1) * self.epoch_steps / self.steps


@dataclass
class PlateauShape:
    """Multiply by `factor` after more than `patience` evaluations without a better value of a metric.

    As torch's ReduceLROnPlateau, but with a threshold relative to the absolute value, so that a metric may be
    negative. A metric that is not minimized begins with a `best` of -infinity.
    """

    factor: float
    patience: int
    threshold: float
    best: float = math.inf
    bad_evaluations: int = 0
    share: float = 1.0
    is_minimized: bool = True

    @property
    def worst(self) -> float:
        """The value that any other is better than."""
        return math.inf if self.is_minimized else -math.inf

    def _bound(self) -> float:
        """Return what a better value must pass: `best` and `threshold` times its absolute value."""
        if self.best == -math.inf:  # which times 1 - threshold may be NaN or infinity
            return self.best
        # As a factor, for the same rounding as torch's.
        is_away_from_0 = self.is_minimized == (self.best < 0)
        return self.best * (1 + self.threshold if is_away_from_0 else 1 - self.threshold)

    def __call__(self, step: int) -> float:
        """Return the current share of the peak."""
        return self.share

    def observe(self, value: float) -> None:
        """Count an evaluation without improvement, or reset the count."""
        if value < self._bound() if self.is_minimized else value > self._bound():
            self.best, self.bad_evaluations = value, 0
            return
        self.bad_evaluations += 1
        if self.bad_evaluations > self.patience:
            self.share, self.bad_evaluations = self.share * self.factor, 0

    def state_dict(self) -> dict[str, Any]:
        """Return plain values that a resumed run needs. An infinite `best` is None, for JSON."""
        best = None if math.isinf(self.best) else self.best
        return {"best": best, "bad_evaluations": self.bad_evaluations, "share": self.share}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned."""
        self.best = self.worst if state["best"] is None else state["best"]
        self.bad_evaluations, self.share = state["bad_evaluations"], state["share"]


@dataclass
class RangeTestShape:
    """Rise from `start` at step 0 to 1 at step `last` by a constant factor per step (Smith 2017, arXiv 1506.01186).

    The loss has diverged once its exponential moving average is above `max_rise` times the average's minimum.
    """

    start: float
    last: int
    max_rise: float
    average: float = 0.0
    weight: float = 0.0
    lowest: float = math.inf
    has_diverged: bool = False

    def __call__(self, step: int) -> float:
        """Return the share of the peak at `step`."""
        return math.pow(self.start, 1 - min(1.0, step / max(1, self.last)))

    def observe_loss(self, loss: float) -> None:
        """Add a training loss, averaged over all ranks, to the moving average, and compare it with its minimum."""
        self.average += (1 - _LOSS_DECAY) * (loss - self.average)
        self.weight += (1 - _LOSS_DECAY) * (1 - self.weight)
        smoothed = self.average / self.weight  # without the bias towards 0 of the first losses
        self.lowest = min(self.lowest, smoothed)
        self.has_diverged = self.has_diverged or smoothed > self.max_rise * self.lowest

    def state_dict(self) -> dict[str, Any]:
        """Return plain values that a resumed run needs. An infinite `lowest` is None, for JSON."""
        lowest = None if math.isinf(self.lowest) else self.lowest
        return {"average": self.average, "weight": self.weight, "lowest": lowest, "has_diverged": self.has_diverged}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned."""
        self.average, self.weight, self.has_diverged = state["average"], state["weight"], state["has_diverged"]
        self.lowest = math.inf if state["lowest"] is None else state["lowest"]


@dataclass(frozen=True)
class LrSchedule:
    """The learning rate of each step, from 0: warm-up, then `shape`.

    `PlateauShape` and `RangeTestShape` have state.
    """

    peak: float
    warmup: LrWarmup
    shape: LrShape

    def lr(self, step: int) -> float:
        """Return the learning rate of optimizer step `step`."""
        return self.peak * self.warmup.share(step) * self.shape(step)

    def observe(self, value: float, step: int) -> None:
        """Observe the monitored metric after `step` steps; evaluations up to the end of the warm-up do not count."""
        if isinstance(self.shape, PlateauShape) and step > self.warmup.steps:
            self.shape.observe(value)

    def observe_loss(self, loss: float) -> None:
        """Observe a logged training loss, averaged over ranks, and over the steps since the last one."""
        if isinstance(self.shape, RangeTestShape):
            self.shape.observe_loss(loss)

    @property
    def has_diverged(self) -> bool:
        """Whether a range test has seen enough: the run ends here."""
        return isinstance(self.shape, RangeTestShape) and self.shape.has_diverged

    def state_dict(self) -> dict[str, Any]:
        """Return plain values that a resumed run needs: those of the shape, {} for a shape without state."""
        return self.shape.state_dict() if isinstance(self.shape, PlateauShape | RangeTestShape) else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned."""
        if isinstance(self.shape, PlateauShape | RangeTestShape):
            self.shape.load_state_dict(state)


def build_lr_schedule(section: ScheduleSection, plan: Plan, *, is_minimized: bool = True) -> LrSchedule:
    """Return the schedule of `section`, with durations converted to steps by `plan`.

    `is_minimized` is whether a plateau schedule observes a metric that falls.
    """
    if isinstance(section, sections.OneCycle):
        shape = OneCycleShape(max(1, plan.steps(section.peak_at)), plan.total_steps, section.start, section.final)
        return LrSchedule(plan.peak_lr, LrWarmup(0, 0.0), shape)
    if isinstance(section, sections.RangeTest):
        rise = RangeTestShape(section.start, plan.total_steps - 1, section.max_rise)
        return LrSchedule(plan.peak_lr, LrWarmup(0, 0.0), rise)
    stair = plan.steps_per_epoch if section.warmup_by == "epoch" else 0
    warmup = LrWarmup(plan.steps(section.warmup), section.warmup_start, section.warmup_shape, stair)
    return LrSchedule(plan.peak_lr, warmup, _build_shape(section, plan, warmup.steps, is_minimized=is_minimized))


def sample_lr_points(schedule: LrSchedule, total_steps: int) -> list[tuple[int, float]]:
    """Return a fixed schedule as (step, learning rate) points to join by straight lines; none for `Plateau`.

    Midpoints are within 0.2 % of the peak of the line. The step with the peak is included.
    """
    if isinstance(schedule.shape, PlateauShape) or total_steps < 1:
        return []
    last = total_steps - 1
    grid = sorted({round(last * i / 32) for i in range(33)})
    tolerance = 0.002 * schedule.peak

    def between(first: int, end: int) -> list[int]:  # halves the interval until its midpoint is on the line
        middle = (first + end) // 2
        if middle == first:
            return []
        low, high = schedule.lr(first), schedule.lr(end)
        line = low + (high - low) * (middle - first) / (end - first)
        if abs(schedule.lr(middle) - line) <= tolerance:
            return []
        return [*between(first, middle), middle, *between(middle, end)]

    steps = [grid[0]]
    for first, end in pairwise(grid):
        steps += [*between(first, end), end]
    at = max(range(len(steps)), key=lambda index: schedule.lr(steps[index]))
    near_peak = range(steps[max(0, at - 1)], steps[min(len(steps) - 1, at + 1)] + 1)
    steps = sorted({*steps, max(near_peak, key=schedule.lr)})
    return [(step, schedule.lr(step)) for step in steps]


def _build_shape(
    section: sections.Constant
    | sections.Cosine
    | sections.Linear
    | sections.Polynomial
    | sections.Step
    | sections.Plateau,
    plan: Plan,
    warmup: int,
    *,
    is_minimized: bool,
) -> LrShape:
    match section:
        case sections.Constant():
            return lambda step: 1.0
        case sections.Cosine(final=final):
            return DecayShape(warmup, plan.total_steps, final, half_cosine)
        case sections.Linear(final=final):
            return DecayShape(warmup, plan.total_steps, final, power_curve(1.0))
        case sections.Polynomial(power=power, final=final):
            return DecayShape(warmup, plan.total_steps, final, power_curve(power))
        case sections.Step(milestones=milestones, factor=factor):
            return MilestoneShape(tuple(plan.steps(milestone) for milestone in milestones), factor)
        case sections.Plateau(factor=factor, patience=patience, threshold=threshold):
            shape = PlateauShape(factor, patience, threshold, is_minimized=is_minimized)
            shape.best = shape.worst
            return shape
