"""Throughput over windows of steps, and timers of the training loop."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np

from paceline.measure.timer import now_s

WINDOW_STEPS: Final = 10


@dataclass(frozen=True)
class Throughput:
    """Images/s over all measured steps, waiting for data included.

    `spread` is the (10th, 90th) percentile of images/s over `n` consecutive windows of up to 10 steps; `excluded_s`
    seconds of warm-up and pauses are in neither. All are 0 without a measured step.
    """

    images_per_s: float
    spread: tuple[float, float]
    n: int
    excluded_s: float


def throughput(step_s: Sequence[float], images_per_step: int, excluded_s: float) -> Throughput:
    """Return the throughput of steps of `step_s` seconds each with `images_per_step` images over all ranks."""
    wall_s = float(sum(step_s))
    if wall_s <= 0:
        return Throughput(0.0, (0.0, 0.0), 0, excluded_s)
    windows = [step_s[start : start + WINDOW_STEPS] for start in range(0, len(step_s), WINDOW_STEPS)]
    rates = [images_per_step * len(window) / sum(window) for window in windows if sum(window) > 0]
    low, high = np.percentile(rates, [10, 90])
    return Throughput(images_per_step * len(step_s) / wall_s, (float(low), float(high)), len(rates), excluded_s)


def unix_s() -> float:
    """Return seconds since 1970, for comparisons between processes; it jumps if the host clock is set."""
    return time.time()


def steady_unix_s() -> Callable[[], float]:
    """Return a clock of seconds since 1970 that ignores later changes of the host clock."""
    began_s = unix_s() - now_s()
    return lambda: began_s + now_s()


class RunTimer:
    """Seconds of training, including `before_s` of earlier processes, and images/s since the last reset.

    `elapsed_s` includes evaluations and checkpoints. `train_s`, of which earlier processes had `train_before_s`, and
    the rate exclude what is `paused`.
    """

    def __init__(
        self, before_s: float = 0.0, now: Callable[[], float] = time.perf_counter, *, train_before_s: float = 0.0
    ) -> None:
        self._now = now
        self._before_s = before_s
        self._train_before_s = train_before_s
        self._paused_s = 0.0
        self._paused_since: float | None = None
        self.started_s = now()
        self._rate_since_s = self.started_s
        self._images = 0

    @property
    def elapsed_s(self) -> float:
        """Seconds of training so far, including earlier processes."""
        return self._before_s + self.process_elapsed_s

    @property
    def process_elapsed_s(self) -> float:
        """Seconds of training in this process."""
        return self._now() - self.started_s

    @property
    def train_s(self) -> float:
        """Seconds of training so far without pauses, including earlier processes; constant during a pause."""
        until_s = self._now() if self._paused_since is None else self._paused_since
        return self._train_before_s + (until_s - self.started_s) - self._paused_s

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude an evaluation or a checkpoint from `train_s` and from the rate."""
        self._paused_since = self._now()
        try:
            yield
        finally:
            self._paused_s += self._now() - self._paused_since
            self._paused_since = None
            self.update_rate()

    def add(self, images: int) -> None:
        """Count trained images of all ranks."""
        self._images += images

    def rate(self) -> float:
        """Return images/s since the last reset, and reset."""
        now = self._now()
        elapsed_s, images = now - self._rate_since_s, self._images
        self.update_rate()
        return images / elapsed_s if elapsed_s > 0 else 0.0

    def update_rate(self) -> None:
        """Restart the interval of `rate`."""
        self._rate_since_s, self._images = self._now(), 0


class IntervalTimer:
    """Trigger once every `every_s` seconds, first that long after creation; 0 never triggers."""

    def __init__(self, every_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self._every_s = every_s
        self._now = now
        self._last_due_s = now()

    def is_due(self) -> bool:
        """Return whether the time is up, and if so restart the interval."""
        if not self._every_s or self._now() - self._last_due_s < self._every_s:
            return False
        self._last_due_s = self._now()
        return True
