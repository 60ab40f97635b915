"""Time how batches are made, and aggregate the timings per loader into `LoaderResult`. Torch-free."""

import operator
from collections.abc import Callable
from typing import Literal, NamedTuple

from paceline.core.results import LoaderResult

# Time since the last reading of the clock is charged to the stage that ends, so that the stages add up to the whole
# batch. DataLoader's own transfer from a worker, in a thread of the main process, belongs to no stage.
BatchStage = Literal["read", "decode", "augment", "collate"]
# Names of the loaders, as in `LoaderResult.loader`.
LoaderName = Literal["inline", "device", "nvjpeg", "native", "threads", "processes"]


class BatchTiming(NamedTuple):
    """Seconds per stage of making a batch, its sizes, and when it was finished."""

    images: int = 0
    read_s: float = 0.0
    decode_s: float = 0.0  # includes resizing
    augment_s: float = 0.0  # random draws, and augmentation of the whole batch
    collate_s: float = 0.0  # the rest: indices, stacking and, in the main process, pinning
    bytes_read: int = 0  # encoded files, or pixels from the source
    bytes_made: int = 0  # pixels of the batch
    finished_at_s: float = 0.0  # by the clock of the timer

    @property
    def seconds(self) -> float:
        """Sum of the stages in seconds."""
        return self.read_s + self.decode_s + self.augment_s + self.collate_s

    def add(self, other: "BatchTiming") -> "BatchTiming":
        """Return the sum, finished when the later one was."""
        total = BatchTiming._make(map(operator.add, self, other))
        return total._replace(finished_at_s=max(self.finished_at_s, other.finished_at_s))


class BatchTimer:
    """Time the stages of making a batch by `clock`, in seconds, which is read once per call; None times nothing."""

    def __init__(self, clock: Callable[[], float] | None) -> None:
        self._now = clock
        self.start()

    def start(self) -> None:
        """Start a batch; an unfinished one is discarded."""
        self._seconds: dict[BatchStage, float] = {"read": 0.0, "decode": 0.0, "augment": 0.0, "collate": 0.0}
        self._bytes_read = 0
        self._last_s = self._now() if self._now else 0.0

    def end_stage(self, stage: BatchStage) -> None:
        """Charge the time since the last call of any method to `stage`."""
        if self._now is None:
            return
        now_s = self._now()
        self._seconds[stage] += now_s - self._last_s
        self._last_s = now_s

    def end_read(self, num_bytes: int) -> None:
        """Charge the time to reading `num_bytes`."""
        self.end_stage("read")
        self._bytes_read += num_bytes

    def finish(self, images: int, bytes_made: int) -> BatchTiming:
        """Charge the time to collating, and return the timing, an empty one without a clock."""
        if self._now is None:
            return BatchTiming()
        self.end_stage("collate")
        return BatchTiming(
            images=images,
            read_s=self._seconds["read"],
            decode_s=self._seconds["decode"],
            augment_s=self._seconds["augment"],
            collate_s=self._seconds["collate"],
            bytes_read=self._bytes_read,
            bytes_made=bytes_made,
            finished_at_s=self._last_s,
        )


class LoaderStats:
    """Aggregate the batches that a loader delivers by `clock`, which the batch timers use too; None records nothing."""

    def __init__(self, clock: Callable[[], float] | None, workers: int, loader: LoaderName) -> None:
        self._now = clock
        self._loader = loader
        self._workers = workers
        self._work = BatchTiming()
        self._batches = 0
        self._ready_batches = 0
        self._depth_sum = 0
        self._num_ready = 0
        self._requested_s = 0.0
        self._wait_s = 0.0
        self._alive = 0
        self._alive_since_s = 0.0
        self._alive_s = 0.0

    def start_workers(self, workers: int) -> None:
        """Record that `workers` workers start, and that earlier ones have ended."""
        if self._now is None:
            return
        self._alive = workers
        self._alive_since_s = self._now()

    def request_batch(self, num_ready: int) -> None:
        """Record that the rank requests a batch while `num_ready` are ready."""
        if self._now is None:
            return
        self._num_ready = num_ready
        self._requested_s = self._now()

    def deliver_batch(self, timing: BatchTiming) -> None:
        """Record that the requested batch is delivered, and its timing."""
        if self._now is None:
            return
        now_s = self._now()
        self._work = self._work.add(timing)
        self._batches += 1
        self._wait_s += now_s - self._requested_s
        self._depth_sum += self._num_ready
        # Also compare times: with `_num_ready` > 0, only later batches may be ready.
        self._ready_batches += self._num_ready > 0 and timing.finished_at_s <= self._requested_s
        # Workers count as alive from their start to the last delivered batch, pauses of the rank included.
        self._alive_s += self._alive * (now_s - self._alive_since_s)
        self._alive_since_s = now_s

    def build_result(self) -> LoaderResult | None:
        """Return the totals so far, or None without a clock."""
        if self._now is None:
            return None
        work, num = self._work, max(1, self._batches)  # 1: before the first batch the means are 0
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
            queue_depth=self._depth_sum / num,
            ready=self._ready_batches / num,
            bytes_read=work.bytes_read,
            bytes_made=work.bytes_made,
            busy=work.seconds / self._alive_s if self._alive_s > 0 else None,
        )
