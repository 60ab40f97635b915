"""Loader with Python threads: for sources that wait for I/O and decoders that release the GIL."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial

from paceline.core.results import LoaderResult
from paceline.core.units import Duration
from paceline.data.batch import Batch
from paceline.data.batches import Batches, Made
from paceline.data.hands import Hands
from paceline.data.tally import Tally
from paceline.data.waiting import result
from paceline.data.workers import Spot, Trail

# Batches that each thread prefetches.
PREFETCH = 2


class ThreadLoader:
    """Prefetch batches in threads, each batch in one thread with one of the `members`.

    The threads start with the first batch and live until `close`. If no batch arrives within `timeout`, raise a
    `WatchError` that names the sample; a hanging thread cannot be killed, but does not block the run's exit.
    """

    def __init__(
        self,
        members: Sequence[Batches],
        *,
        pin_memory: bool,
        timeout: Duration,
        trail: Trail,
        name_of: Callable[[int], str],
        tally: Tally,
    ) -> None:
        self._members = members
        self._trail = trail
        self._trails = [trail.of(worker) for worker in range(len(members))]
        self._pin_memory = pin_memory
        self._timeout = timeout
        self._title = members[0].schedule.title
        self._name_of = name_of
        self._tally = tally
        self._hands: Hands[Made] | None = None

    def batches(self, first: int, stop: int) -> Iterator[Batch]:
        """Return an iterator over the batches; each thread prefetches `PREFETCH` of them."""
        if self._hands is None or not self._hands.are_here:
            self._hands = Hands(len(self._members), "loader")
        self._tally.start(len(self._members))
        ahead: deque[Future[Made]] = deque()
        try:
            for number in range(first, stop):
                for following in range(number + len(ahead), min(stop, number + PREFETCH * len(self._members))):
                    ahead.append(self._hands.submit(partial(self._make, following)))
                self._tally.ask(sum(future.done() for future in ahead))
                made = result(ahead.popleft(), self._timeout, partial(self._hang, number))
                self._tally.hand(made.work)
                yield made.batch
        finally:
            for future in ahead:
                future.cancel()

    def stats(self) -> LoaderResult | None:
        """Return the timing of all batches so far."""
        return self._tally.stats()

    def close(self) -> None:
        """End the threads."""
        if self._hands is not None:
            self._hands.close()
            self._hands = None

    def _make(self, number: int, worker: int) -> Made:
        self._trails[worker].batch(number)
        return self._members[worker].make(number, pin_memory=self._pin_memory)

    def _hang(self, number: int) -> str:
        worker, spot = self._trail.who_is_at(number) or (-1, Spot(-1, number, -1))
        at = f", at sample {spot.sample}, {self._name_of(spot.sample)}" if spot.sample >= 0 else ""
        return (
            f"data.worker_timeout: no batch for {self._timeout}: thread {worker} hangs in {self._title(number)}{at} "
            f"(check that image and its disk, or raise data.worker_timeout)"
        )
