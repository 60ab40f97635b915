"""Estimate the time of a run from its first steps: steps, evaluations, checkpoints, and the end. Reads no recipe."""

import contextlib
import math
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import fsum
from statistics import fmean, median, stdev
from typing import Final, NamedTuple

from paceline.core.results import TimeForecast
from paceline.core.stages import WEIGH
from paceline.core.statistics import NORMAL_QUANTILE
from paceline.recipe.plan import Plan

MIN_BLOCKS: Final = 5
_BLOCK_S: Final = 0.5
_MAX_BLOCKS: Final = 512
_MAX_PAUSES: Final = 5
_MAX_OVER_MEDIAN: Final = 3.0
_MAX_CORRELATION: Final = 0.8
FORWARD_SHARE: Final = 1 / 3
"""Time of evaluating an image over that of training on it: the backward pass takes twice the forward pass."""
_UNFROZEN: Final = 2.0
"""Time of a step that trains all parameters over one with frozen ones, before it is measured: between 1, if loading
takes all the time, and 3, if only the classifier is trained."""
CHECKPOINT_BYTES_PER_S: Final = 5e8
"""Speed at which a checkpoint is assumed to be written before the first one."""
_END_S: Final = 0.5
"""Time from the last step to the result, for joining workers and hashing weights: an assumption."""
_DRIFT: Final = 0.08
"""Share by which the speed of a run may differ between its first seconds and its rest: an assumption."""
_UNMEASURED: Final = (0.6, 1.5)
"""Shares by which a time that is not measured yet may be shorter and longer."""
_MEASURED_PAUSE: Final = 0.15
"""Share by which later evaluations and checkpoints may differ from the mean of those measured."""


class Phase(NamedTuple):
    """Steps that take the same time: their image size in pixels, and whether parameters are frozen until later."""

    size: int
    is_frozen: bool = False


@dataclass(frozen=True)
class PlannedWork:
    """The work of a run: `total_steps`, and evaluations and checkpoints after every so many steps (0: never).

    `sizes` are the image sizes in pixels by first step, `eval_images` the images of an evaluation times its passes, at
    `eval_size` pixels. `save_every_s` is an interval in seconds of training (0: none). Frozen parameters train from
    `unfreeze_step` on. After the steps `weigh_after`, the losses of `weigh_images` training images are measured.
    """

    total_steps: int
    batch_size: int
    eval_every: int = 0
    eval_images: int = 0
    save_every: int = 0
    save_every_s: float = 0.0
    checkpoint_bytes: int = 0
    sizes: Sequence[tuple[int, int]] = ((0, 1),)
    eval_size: int = 1
    unfreeze_step: int = 0
    weigh_after: range = range(0)
    weigh_images: int = 0

    @classmethod
    def from_plan(
        cls,
        plan: Plan,
        *,
        eval_passes: int = 1,
        evaluates_train: bool = False,
        checkpoint_bytes: int = 0,
        weigh_after: range = range(0),
    ) -> "PlannedWork":
        """Return the work of `plan`: evaluations pass over the validation images, and training images if it says so."""
        images = plan.val_images + (min(plan.val_images, plan.train_images) if evaluates_train else 0)
        return cls(
            plan.total_steps,
            plan.batch_size,
            plan.eval_every,
            eval_passes * images,
            plan.checkpoint_every,
            plan.checkpoint_every_s,
            checkpoint_bytes,
            plan.train_sizes,
            plan.eval_image_size,
            plan.unfreeze_step,
            weigh_after,
            plan.train_images,
        )

    @property
    def saves(self) -> bool:
        """Whether the run writes checkpoints."""
        return self.save_every > 0 or self.save_every_s > 0

    def evaluations(self, step: int = 0) -> int:
        """Return the number of evaluations after `step` steps."""
        return _count_due(self.eval_every, step, self.total_steps)

    def checkpoints(self, step: int = 0, left_s: float = 0.0) -> int:
        """Return the number of checkpoints in the remaining `left_s` seconds after `step` steps."""
        if self.save_every_s:
            return int(left_s / self.save_every_s) + 1
        return _count_due(self.save_every, step, self.total_steps)

    def phase(self, step: int) -> Phase:
        """Return the phase of step `step`, from 0."""
        size = self.sizes[bisect_right(self.sizes, step, key=lambda each: each[0]) - 1][1]
        return Phase(size, step < self.unfreeze_step)

    def steps_by_phase(self, step: int) -> dict[Phase, int]:
        """Return the number of steps after `step` by phase."""
        starts = sorted({*(start for start, _ in self.sizes), self.unfreeze_step, self.total_steps})
        steps: dict[Phase, int] = {}
        for start, end in pairwise(starts):
            phase = self.phase(start)
            steps[phase] = steps.get(phase, 0) + max(0, min(end, self.total_steps) - max(start, step))
        return {phase: number for phase, number in steps.items() if number}


def _count_due(every: int, step: int, last: int) -> int:
    """Return how often `StepInterval(every, last)` is due after `step`."""
    return last // every - step // every + bool(last % every and step < last) if every else 0


@dataclass(frozen=True)
class _Block:
    """Consecutive steps of one phase, and their seconds without pauses."""

    steps: int
    seconds: float
    phase: Phase

    @property
    def step_s(self) -> float:
        return self.seconds / self.steps


class RunEstimator:
    """Estimate the time of a run, from the times of steps and pauses that it is told of.

    The first step starts the clock: it compiles, fills caches and waits for the first batch. After it, steps form
    blocks of at least half a second, as the times of neighboring steps depend on each other. `now` returns seconds. The
    run ends after `limit_s` at the latest.
    """

    def __init__(
        self,
        work: PlannedWork,
        start: int = 0,
        now: Callable[[], float] = time.perf_counter,
        *,
        limit_s: float = math.inf,
    ) -> None:
        self.work = work
        self.step = start
        self._now = now
        self._ends_s = now() + limit_s
        self._updated_s = now()
        self._block_s = _BLOCK_S
        self._open: tuple[int, float] | None = None  # first step of the open block, and its begin
        self._blocks: list[_Block] = []
        self._pauses: dict[str, dict[int, float]] = {"evaluate": {}, "checkpoint": {}, WEIGH: {}}

    def update(self, step: int) -> None:
        """Record that `step` steps are complete; a call costs less than a microsecond."""
        if step <= self.step:
            return
        now_s, first = self._now(), self._open
        self.step, self._updated_s = step, now_s
        if first is None:
            self._open = (step, now_s)
        elif now_s - first[1] >= self._block_s or self.work.phase(step) != self.work.phase(first[0]):
            self._open = (step, now_s)
            self._add(_Block(step - first[0], now_s - first[1], self.work.phase(first[0])))

    def _add(self, block: _Block) -> None:
        blocks = [*self._blocks, block]
        if len(blocks) > _MAX_BLOCKS:  # merge neighbors, so that a long run needs no more memory
            self._block_s *= 2
            pairs = zip(blocks[::2], blocks[1::2], strict=False)
            blocks = [
                _Block(one.steps + two.steps, one.seconds + two.seconds, two.phase) for one, two in pairs
            ] + blocks[len(blocks) // 2 * 2 :]
        self._blocks = blocks  # replaced, not changed: another thread may read it

    @contextlib.contextmanager
    def paused(self, name: str, step: int) -> Iterator[None]:
        """Record a pause `evaluate`, `checkpoint` or `weigh` after `step` steps, whose time is in no block."""
        begin_s = self._now()
        try:
            yield
        finally:
            pause_s = self._now() - begin_s
            known = self._pauses.get(name, {})
            self._pauses[name] = {**known, step: known.get(step, 0.0) + pause_s}
            if self._open is not None:
                self._open = (self._open[0], self._open[1] + pause_s)
            self._updated_s = self._now()

    @property
    def is_ready(self) -> bool:
        """Whether enough blocks are complete for an interval."""
        return len(self._blocks) >= MIN_BLOCKS

    @property
    def step_s(self) -> float | None:
        """Seconds per step of the current phase; None before the second step."""
        blocks, phase = self._all_blocks(), self.work.phase(max(0, self.step - 1))
        same = [block for block in blocks if block.phase == phase] or blocks
        return _mean_step_s(_drop_transient(same)) if same else None

    @property
    def left_s(self) -> float | None:
        """Seconds until the end of the run; None before the second step."""
        forecast, step_s = self.remaining(), self.step_s
        if forecast is None or step_s is None:
            return None
        # Count down within a step, but not below the end of it.
        return max(0.0, forecast.predicted_s - min(self._now() - self._updated_s, step_s))

    def remaining(self) -> TimeForecast | None:
        """Return the time from the last step to the result, within the time limit; None before the second step."""
        forecast, limit_s = self.forecast(self.step), max(0.0, self._ends_s - self._updated_s)
        if forecast is None or forecast.high_s <= limit_s:
            return forecast
        names = ("predicted_s", "low_s", "high_s")
        return forecast.model_copy(update={name: min(limit_s, getattr(forecast, name)) for name in names})

    def forecast(self, step: int) -> TimeForecast | None:
        """Return the time from `step` completed steps to the result; None before the second step.

        A 95 % interval of the sum of the blocks to come has their variance and that of the mean, both inflated by the
        correlation of neighboring blocks (batch means, Law and Kelton 2000, section 9.5.3). Errors that are not random
        are added in squares: that the machine changes its speed, that pauses differ from those measured, and larger
        ones for what has not happened yet.
        """
        blocks = self._all_blocks()
        errors: list[tuple[float, float]] = [_unmeasured(_END_S)]  # seconds below and above
        steps_s = eval_step_s = 0.0
        num_steps = self.work.steps_by_phase(step) or {self.work.phase(max(0, step - 1)): 0}
        if not blocks:
            return None
        for phase, number in num_steps.items():
            same = _drop_transient([block for block in blocks if block.phase == phase])
            step_s = _mean_step_s(same) if same else _scale_step_s(blocks, phase)
            half_s = _half_width(same, number)
            below_s, above_s = _unmeasured(number * step_s)
            # Few blocks that differ much have an interval below 0 s.
            errors += [(below_s, above_s) if half_s is None else (min(half_s, below_s), half_s)]
            errors += [(_DRIFT * number * step_s,) * 2]
            steps_s += number * step_s
            eval_step_s = step_s * (self.work.eval_size / phase.size) ** 2
        num_evals, num_saves = self.work.evaluations(step), self.work.checkpoints(step, steps_s)
        num_weighed = sum(each > step for each in self.work.weigh_after)
        image_s = FORWARD_SHARE * eval_step_s / self.work.batch_size
        eval_s, eval_error = self._mean_pause("evaluate", image_s * self.work.eval_images)
        weigh_s, weigh_error = self._mean_pause(WEIGH, image_s * self.work.weigh_images)
        save_s, save_error = self._mean_pause("checkpoint", self.work.checkpoint_bytes / CHECKPOINT_BYTES_PER_S)
        pauses = ((num_evals, eval_error), (num_saves, save_error), (num_weighed, weigh_error))
        for number, (below_s, above_s) in pauses:
            errors.append((number * below_s, number * above_s))
        predicted_s = steps_s + num_evals * eval_s + num_saves * save_s + num_weighed * weigh_s + _END_S
        below_s, above_s = (math.sqrt(fsum(error[side] ** 2 for error in errors)) for side in (0, 1))
        return TimeForecast(
            predicted_s=predicted_s,
            low_s=max(0.0, predicted_s - below_s),
            high_s=predicted_s + above_s,
            steps=sum(num_steps.values()),
            step_s=steps_s / max(1, sum(num_steps.values())),
            evaluations=num_evals,
            eval_s=eval_s,
            checkpoints=num_saves,
            checkpoint_s=save_s,
        )

    def _all_blocks(self) -> list[_Block]:
        """Return the complete blocks, or the open one if there is none."""
        blocks, begin = self._blocks, self._open
        if blocks or begin is None or self.step == begin[0]:
            return blocks
        return [_Block(self.step - begin[0], self._updated_s - begin[1], self.work.phase(begin[0]))]

    def _mean_pause(self, name: str, assumed_s: float) -> tuple[float, tuple[float, float]]:
        """Return the seconds of a pause, and its errors below and above; `assumed_s` before the first."""
        known = [*self._pauses[name].values()]
        if not known:
            return assumed_s, _unmeasured(assumed_s)
        # The first one warms up, too.
        mean_s = fmean(known[1:][-_MAX_PAUSES:] or known)
        return mean_s, (_MEASURED_PAUSE * mean_s, _MEASURED_PAUSE * mean_s)


def _unmeasured(seconds: float) -> tuple[float, float]:
    below, above = _UNMEASURED
    return below * seconds, above * seconds


def _drop_transient(blocks: list[_Block]) -> list[_Block]:
    """Return the blocks without slower or faster ones at the start, at most half of them (MSER, White 1997, doi
    10.1177/003754979706900601).

    The standard error of the mean of those that are kept is smallest.
    """
    count, total, squares = len(blocks), 0.0, 0.0
    best, dropped = math.inf, 0
    if count < 2 * MIN_BLOCKS:
        return blocks
    for first in range(count - 1, -1, -1):
        total, squares, number = total + blocks[first].step_s, squares + blocks[first].step_s ** 2, count - first
        variance = max(0.0, squares / number - (total / number) ** 2)
        if first <= count // 2 and variance / number <= best:
            best, dropped = variance / number, first
    return blocks[dropped:]


def _mean_step_s(blocks: Sequence[_Block]) -> float:
    """Return the mean seconds per step; blocks above three times the median count as that (winsorized)."""
    # A stall of seconds that happens once counts for little, and a short one that happens often in full.
    highest_s = _MAX_OVER_MEDIAN * median(block.step_s for block in blocks)
    return fsum(min(block.step_s, highest_s) * block.steps for block in blocks) / sum(block.steps for block in blocks)


def _scale_step_s(blocks: Sequence[_Block], phase: Phase) -> float:
    """Return the seconds per step of a phase that was not measured, by the nearest that was.

    They are scaled by the pixels of an image, and if the other one has frozen parameters.
    """
    nearest = min(
        {block.phase for block in blocks},
        key=lambda each: (each.is_frozen != phase.is_frozen, abs(each.size - phase.size)),
    )
    step_s = _mean_step_s([block for block in blocks if block.phase == nearest]) * (phase.size / nearest.size) ** 2
    return step_s * _UNFROZEN ** (nearest.is_frozen - phase.is_frozen)


def _half_width(blocks: Sequence[_Block], number: int) -> float | None:
    """Return the half-width in seconds of the 95 % interval for `number` more steps; None for too few blocks."""
    count = len(blocks)
    if count < MIN_BLOCKS:
        return None
    times = [block.step_s for block in blocks]
    mean_s, spread_s = _mean_step_s(blocks), stdev(times)
    products = fsum((one - mean_s) * (two - mean_s) for one, two in pairwise(times))
    correlation = min(_MAX_CORRELATION, max(0.0, products / (count * spread_s**2))) if spread_s else 0.0
    inflation = (1 + correlation) / (1 - correlation)
    ahead = number * count / sum(block.steps for block in blocks)  # blocks to come
    # Student's quantile by its expansion in 1 / degrees (Abramowitz and Stegun, 26.7.5).
    quantile = NORMAL_QUANTILE + (NORMAL_QUANTILE**3 + NORMAL_QUANTILE) / (4 * (count - 1))
    return quantile * spread_s * number * math.sqrt(inflation * (1 / count + 1 / max(1.0, ahead)))
