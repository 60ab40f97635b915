"""Aggregate the timings of a loader's batches into `LoaderResult`. Torch-free."""

from collections.abc import Callable
from typing import Literal, Protocol

from paceline.core.results import LoaderResult
from paceline.data.laps import BatchTiming

# Names of the loaders, as in `LoaderResult.loader`.
LoaderName = Literal["inline", "device", "nvjpeg", "native", "threads", "processes"]


class LoaderStats(Protocol):
    """Aggregate the batches that a loader hands out."""

    def start_workers(self, workers: int) -> None:
        """Record that `workers` workers start, and that earlier ones have ended."""
        ...

    def request_batch(self, num_ready: int) -> None:
        """Record that the rank requests a batch while `num_ready` are made."""
        ...

    def deliver_batch(self, timing: BatchTiming) -> None:
        """Record that the requested batch is handed out, and the timing of making it."""
        ...

    def build_result(self) -> LoaderResult | None:
        """Return the totals of all batches so far, or None if timing is off."""
        ...


class NoLoaderStats:
    """Record nothing."""

    def start_workers(self, workers: int) -> None:
        """Do nothing."""

    def request_batch(self, num_ready: int) -> None:
        """Do nothing."""

    def deliver_batch(self, timing: BatchTiming) -> None:
        """Do nothing."""

    def build_result(self) -> None:
        """Return None."""


class ClockLoaderStats:
    """Aggregate with the clock `now`, in seconds, which the batch timers use too.

    `workers` is the number of workers while all live. They count as alive from their start to the last batch handed
    out, including pauses of the rank. Starting workers does not count as waiting.
    """

    def __init__(self, clock: Callable[[], float], workers: int, loader: LoaderName) -> None:
        self._now = clock
        self._loader = loader
        self._workers = workers
        self._work = BatchTiming()
        self._batches = 0
        self._ready = 0
        self._depth = 0
        self._num_ready = 0
        self._requested_s = 0.0
        self._wait_s = 0.0
        self._alive = 0
        self._alive_since_s = 0.0
        self._alive_s = 0.0

    def start_workers(self, workers: int) -> None:
        """Record that workers start."""
        self._alive = workers
        self._alive_since_s = self._now()

    def request_batch(self, num_ready: int) -> None:
        """Record a request."""
        self._num_ready = num_ready
        self._requested_s = self._now()

    def deliver_batch(self, timing: BatchTiming) -> None:
        """Record a delivery and its timing."""
        at_s = self._now()
        self._work = self._work.add(timing)
        self._batches += 1
        self._wait_s += at_s - self._requested_s
        self._depth += self._num_ready
        self._ready += self._num_ready > 0 and timing.made_s <= self._requested_s  # a ready batch may be a later one
        self._alive_s += self._alive * (at_s - self._alive_since_s)
        self._alive_since_s = at_s

    def build_result(self) -> LoaderResult:
        """Return the totals."""
        work, num = self._work, max(1, self._batches)
        return LoaderResult(
            loader=self._loader,
            workers=self._workers,
            batches=self._batches,
            images=work.images,
            read_s=work.read_s,
            decode_s=work.decode_s,
            augment_s=work.augment_s,
            collate_s=work.collate_s,
            wait_s=self._wait_s,
            queue_depth=self._depth / num,
            ready=self._ready / num,
            bytes_read=work.bytes_read,
            bytes_made=work.bytes_made,
            busy=work.seconds / self._alive_s if self._alive_s > 0 else None,
        )


def build_loader_stats(clock: Callable[[], float] | None, workers: int, loader: LoaderName) -> LoaderStats:
    """Build the statistics of `workers` workers by the clock `clock`, or ones that do nothing if it is None."""
    return NoLoaderStats() if clock is None else ClockLoaderStats(clock, workers, loader)
