"""Time the stages of making a batch. Torch-free."""

from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

# All time since the last reading of the clock is charged to the stage named next, so that the stages add up to the
# whole batch. DataLoader's own transfer from a worker, in a thread of the main process, belongs to no stage.
BatchStage = Literal["read", "decode", "augment", "collate"]


class BatchTiming(NamedTuple):
    """Timing of one batch in seconds, its sizes, and `made_s`, the clock's seconds when it was done.

    `read_s`: the source. `decode_s`: decoding and resizing. `augment_s`: random draws and augmentation of the whole
    batch. `collate_s`: the rest, such as indices, stacking and, in the main process, pinning. `bytes_read`: encoded
    files or pixels from the source. `bytes_made`: pixels of the batch.
    """

    images: int = 0
    read_s: float = 0.0
    decode_s: float = 0.0
    augment_s: float = 0.0
    collate_s: float = 0.0
    bytes_read: int = 0
    bytes_made: int = 0
    made_s: float = 0.0

    @property
    def seconds(self) -> float:
        """Sum of the stages in seconds."""
        return self.read_s + self.decode_s + self.augment_s + self.collate_s

    def add(self, other: "BatchTiming") -> "BatchTiming":
        """Return the sum of both, done when the later one was."""
        return BatchTiming(
            images=self.images + other.images,
            read_s=self.read_s + other.read_s,
            decode_s=self.decode_s + other.decode_s,
            augment_s=self.augment_s + other.augment_s,
            collate_s=self.collate_s + other.collate_s,
            bytes_read=self.bytes_read + other.bytes_read,
            bytes_made=self.bytes_made + other.bytes_made,
            made_s=max(self.made_s, other.made_s),
        )


class BatchTimer(Protocol):
    """Time the stages of one batch after the other."""

    def start(self) -> None:
        """Start a batch; an unfinished one is discarded."""
        ...

    def end_stage(self, stage: BatchStage) -> None:
        """Charge the time since the last call of any method to `stage`."""
        ...

    def end_read(self, num_bytes: int) -> None:
        """Charge the time to reading, which returned `num_bytes`."""
        ...

    def finish(self, images: int, bytes_made: int) -> BatchTiming:
        """Charge the time to collating, and return the timing of the batch."""
        ...


class NoBatchTimer:
    """Time nothing."""

    def start(self) -> None:
        """Do nothing."""

    def end_stage(self, stage: BatchStage) -> None:
        """Do nothing."""

    def end_read(self, num_bytes: int) -> None:
        """Do nothing."""

    def finish(self, images: int, bytes_made: int) -> BatchTiming:
        """Return an empty timing."""
        return BatchTiming()


class ClockBatchTimer:
    """Time with the clock `now`, which returns seconds and is read once per call."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._now = clock
        self.start()

    def start(self) -> None:
        """Start a batch."""
        self._seconds: dict[BatchStage, float] = {"read": 0.0, "decode": 0.0, "augment": 0.0, "collate": 0.0}
        self._bytes_read = 0
        self._at_s = self._now()

    def end_stage(self, stage: BatchStage) -> None:
        """Charge the time to `stage`."""
        at_s = self._now()
        self._seconds[stage] += at_s - self._at_s
        self._at_s = at_s

    def end_read(self, num_bytes: int) -> None:
        """Charge the time to reading."""
        self.end_stage("read")
        self._bytes_read += num_bytes

    def finish(self, images: int, bytes_made: int) -> BatchTiming:
        """Charge the time to collating, and return the timing."""
        self.end_stage("collate")
        return BatchTiming(
            images=images,
            read_s=self._seconds["read"],
            decode_s=self._seconds["decode"],
            augment_s=self._seconds["augment"],
            collate_s=self._seconds["collate"],
            bytes_read=self._bytes_read,
            bytes_made=bytes_made,
            made_s=self._at_s,
        )


def build_batch_timer(clock: Callable[[], float] | None) -> BatchTimer:
    """Build a timer that reads the clock `clock`, or one that does nothing if it is None."""
    return NoBatchTimer() if clock is None else ClockBatchTimer(clock)
