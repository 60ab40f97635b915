"""What making a batch takes, part by part, by the clock of the process that makes it. Torch-free.

A stopwatch with laps: everything since the last look at the clock belongs to the part that is named now, so the parts
of a batch add up to the whole of it. What a loader makes of many batches is in `data.tally`.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

Part = Literal["read", "decode", "augment", "collate"]


class Work(NamedTuple):
    """What making a batch took, in seconds, and what it came to; `made_s` is when it was done.

    `read_s` is the source's, `decode_s` decoding and sizing, `augment_s` drawing for and changing the whole batch, and
    `collate_s` the rest: which samples they are, stacking, and pinning where the rank makes the batch. Moving it from
    a worker to the rank is done beside by a thread of DataLoader's, and in no part. `bytes_read` is what the source
    gave: encoded, or pixels; `bytes_made` the pixels of the batch.
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
        """The sum of the parts."""
        return self.read_s + self.decode_s + self.augment_s + self.collate_s

    def plus(self, other: "Work") -> "Work":
        """Return what both come to, done when the later one was."""
        return Work(
            images=self.images + other.images,
            read_s=self.read_s + other.read_s,
            decode_s=self.decode_s + other.decode_s,
            augment_s=self.augment_s + other.augment_s,
            collate_s=self.collate_s + other.collate_s,
            bytes_read=self.bytes_read + other.bytes_read,
            bytes_made=self.bytes_made + other.bytes_made,
            made_s=max(self.made_s, other.made_s),
        )


class Laps(Protocol):
    """Time the parts of one batch after the other."""

    def begin(self) -> None:
        """Start a batch, whatever has become of the one before."""
        ...

    def lap(self, part: Part) -> None:
        """Charge the time since the last call of any method to `part`."""
        ...

    def got(self, num_bytes: int) -> None:
        """Charge it to reading, which gave `num_bytes`."""
        ...

    def finish(self, images: int, bytes_made: int) -> Work:
        """Charge it to collating, and return what the batch of `images` images took."""
        ...


class NoLaps:
    """Time nothing."""

    def begin(self) -> None:
        """Do nothing."""

    def lap(self, part: Part) -> None:
        """Do nothing."""

    def got(self, num_bytes: int) -> None:
        """Do nothing."""

    def finish(self, images: int, bytes_made: int) -> Work:
        """Return no work."""
        return Work()


class TimedLaps:
    """Time by `now`, which returns seconds and is asked once a call. A process that is forked goes on with its own."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.begin()

    def begin(self) -> None:
        """Start a batch, whatever has become of the one before."""
        self._seconds: dict[Part, float] = {"read": 0.0, "decode": 0.0, "augment": 0.0, "collate": 0.0}
        self._bytes_read = 0
        self._at_s = self._now()

    def lap(self, part: Part) -> None:
        """Charge the time since the last call of any method to `part`."""
        at_s = self._now()
        self._seconds[part] += at_s - self._at_s
        self._at_s = at_s

    def got(self, num_bytes: int) -> None:
        """Charge it to reading, which gave `num_bytes`."""
        self.lap("read")
        self._bytes_read += num_bytes

    def finish(self, images: int, bytes_made: int) -> Work:
        """Charge it to collating, and return what the batch of `images` images took."""
        self.lap("collate")
        return Work(
            images=images,
            read_s=self._seconds["read"],
            decode_s=self._seconds["decode"],
            augment_s=self._seconds["augment"],
            collate_s=self._seconds["collate"],
            bytes_read=self._bytes_read,
            bytes_made=bytes_made,
            made_s=self._at_s,
        )


def build_laps(now: Callable[[], float] | None) -> Laps:
    """Return what times batches by `now`, or what does nothing where there is none."""
    return NoLaps() if now is None else TimedLaps(now)
