"""Loader with Python threads: for sources that wait for I/O and decoders that release the GIL."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial

from paceline.core.results import LoaderResult
from paceline.core.units import Duration
from paceline.data.batch import Batch
from paceline.data.batches import BatchMaker, TimedBatch
from paceline.data.hands import ThreadPool
from paceline.data.tally import LoaderStats
from paceline.data.waiting import wait_for_result
from paceline.data.workers import WorkerPosition, WorkerProgress

# Batches that each thread prefetches.
BATCHES_PER_THREAD = 2


class ThreadLoader:
    """Prefetch batches in threads, each batch in one thread with one of the `members`.

    The threads start with the first batch and live until `close`. If no batch arrives within `timeout`, raise a
    `WatchError` that names the sample; a hanging thread cannot be killed, but does not block the run's exit.
    """

    def __init__(
        self,
        batch_makers: Sequence[BatchMaker],
        *,
        pin_memory: bool,
        timeout: Duration,
        progress: WorkerProgress,
        name_of: Callable[[int], str],
        loader_stats: LoaderStats,
    ) -> None:
        self._batch_makers = batch_makers
        self._progress = progress
        self._worker_progress = [progress.for_worker(worker) for worker in range(len(batch_makers))]
        self._pin_memory = pin_memory
        self._timeout = timeout
        self._describe_batch = batch_makers[0].schedule.describe
        self._name_of = name_of
        self._loader_stats = loader_stats
        self._pool: ThreadPool[TimedBatch] | None = None

    def batches(self, first: int, stop: int) -> Iterator[Batch]:
        """Return an iterator over the batches; each thread prefetches `BATCHES_PER_THREAD` of them."""
        if self._pool is None or not self._pool.is_in_this_process:
            self._pool = ThreadPool(len(self._batch_makers), "loader")
        self._loader_stats.start_workers(len(self._batch_makers))
        ahead: deque[Future[TimedBatch]] = deque()
        try:
            for number in range(first, stop):
                for following in range(
                    number + len(ahead), min(stop, number + BATCHES_PER_THREAD * len(self._batch_makers))
                ):
                    ahead.append(self._pool.submit(partial(self._make, following)))
                self._loader_stats.request_batch(sum(future.done() for future in ahead))
                made = wait_for_result(ahead.popleft(), self._timeout, partial(self._describe_hang, number))
                self._loader_stats.deliver_batch(made.timing)
                yield made.batch
        finally:
            for future in ahead:
                future.cancel()

    def stats(self) -> LoaderResult | None:
        """Return the timing of all batches so far."""
        return self._loader_stats.build_result()

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _make(self, number: int, worker: int) -> TimedBatch:
        self._worker_progress[worker].set_batch(number)
        return self._batch_makers[worker].make(number, pin_memory=self._pin_memory)

    def _describe_hang(self, number: int) -> str:
        worker, spot = self._progress.find_worker(number) or (-1, WorkerPosition(-1, number, -1))
        at = f", at sample {spot.sample}, {self._name_of(spot.sample)}" if spot.sample >= 0 else ""
        return (
            f"data.worker_timeout: no batch for {self._timeout}: thread {worker} hangs in {self._describe_batch(number)}{at} "
            f"(check that image and its disk, or raise data.worker_timeout)"
        )
