"""What a loader's batches come to: the table of the loader, which stands beside the steps. Torch-free.

What one batch takes is timed where it is made, in `data.laps`; here it is added up in the rank, with what the rank
waited.
"""

from collections.abc import Callable
from typing import Literal, Protocol

from paceline.core.results import LoaderResult
from paceline.data.laps import Work

LoaderName = Literal["inline", "device", "nvjpeg", "native", "threads", "processes"]
"""Who makes batches, as `LoaderResult.loader`."""


class Tally(Protocol):
    """Add up the batches that a loader hands out."""

    def start(self, workers: int) -> None:
        """Note that so many workers come to life, and that others have ended."""
        ...

    def ask(self, num_ready: int) -> None:
        """Note that the rank asks for a batch while `num_ready` are made."""
        ...

    def hand(self, work: Work) -> None:
        """Note that the batch asked for is handed out, and what making it took."""
        ...

    def stats(self) -> LoaderResult | None:
        """Return what all batches handed out so far come to; None where nothing is noted."""
        ...


class NoTally:
    """Note nothing."""

    def start(self, workers: int) -> None:
        """Do nothing."""

    def ask(self, num_ready: int) -> None:
        """Do nothing."""

    def hand(self, work: Work) -> None:
        """Do nothing."""

    def stats(self) -> None:
        """Return nothing."""


class TimedTally:
    """Add up by `now`, the clock in seconds that the makers of batches use too; `workers` of them when all live.

    `loader` is who they are. Starting workers is no wait. They live from when they are started to the last batch that
    is handed out, the pauses of the rank included.
    """

    def __init__(self, now: Callable[[], float], workers: int, loader: LoaderName) -> None:
        self._now = now
        self._loader = loader
        self._workers = workers
        self._work = Work()
        self._batches = 0
        self._ready = 0
        self._depth = 0
        self._num_ready = 0
        self._asked_s = 0.0
        self._wait_s = 0.0
        self._alive = 0
        self._alive_since_s = 0.0
        self._alive_s = 0.0

    def start(self, workers: int) -> None:
        """Note that so many workers come to life, and that others have ended."""
        self._alive = workers
        self._alive_since_s = self._now()

    def ask(self, num_ready: int) -> None:
        """Note that the rank asks for a batch while `num_ready` are made."""
        self._num_ready = num_ready
        self._asked_s = self._now()

    def hand(self, work: Work) -> None:
        """Note that the batch asked for is handed out, and what making it took."""
        at_s = self._now()
        self._work = self._work.plus(work)
        self._batches += 1
        self._wait_s += at_s - self._asked_s
        self._depth += self._num_ready
        self._ready += self._num_ready > 0 and work.made_s <= self._asked_s  # what lies ready may be a later one
        self._alive_s += self._alive * (at_s - self._alive_since_s)
        self._alive_since_s = at_s

    def stats(self) -> LoaderResult:
        """Return what all batches handed out so far come to."""
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


def build_tally(now: Callable[[], float] | None, workers: int, loader: LoaderName) -> Tally:
    """Return what adds up the batches of `workers` workers by `now`, or what does nothing where there is none."""
    return NoTally() if now is None else TimedTally(now, workers, loader)
