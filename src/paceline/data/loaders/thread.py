"""Loader with Python threads: for sources that wait for I/O and decoders that release the GIL."""

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Final, Generic, TypeVar

import torch

from paceline.core.errors import WatchError
from paceline.core.results import LoaderResult
from paceline.core.units import Duration
from paceline.data.batch import Batch
from paceline.data.loaders.batch_maker import BatchMaker, TimedBatch
from paceline.data.timing import LoaderStats
from paceline.data.workers import POLL_S, WorkerPosition, WorkerProgress

ResultT = TypeVar("ResultT")
FutureT = TypeVar("FutureT")

# Batches that each thread prefetches.
BATCHES_PER_THREAD = 2
# Seconds to wait for threads that should end: far longer than one batch takes, unless a thread hangs.
_JOIN_TIMEOUT_S: Final = 2.0
_CallQueue = SimpleQueue[tuple["Future[Any]", Callable[[int], Any]] | None]


class ThreadPool(Generic[ResultT]):
    """`num` threads that live until `close`, garbage collection or interpreter exit.

    Each computes on one core, whatever torch uses elsewhere. A thread that hangs is abandoned.
    """

    def __init__(self, num: int, name: str) -> None:
        self._calls: _CallQueue = SimpleQueue()
        self._pid = os.getpid()
        started = threading.Barrier(num + 1)
        ended: list[Future[None]] = [Future() for _ in range(num)]
        threads = [
            threading.Thread(
                target=_run_calls,
                args=(number, self._calls, started, ended[number]),
                name=f"{name} {number}",
                daemon=True,
            )
            for number in range(num)
        ]
        num_cores = torch.get_num_threads()
        for thread in threads:
            thread.start()
        started.wait()  # until every thread has set its own value
        torch.set_num_threads(num_cores)  # a new thread inherits the value that any thread has set last
        # Runs at interpreter exit too: a thread inside torch after Python is gone would abort the process.
        self._finalizer = weakref.finalize(self, _shut_down, self._calls, threads, ended, self._pid)

    @property
    def is_in_this_process(self) -> bool:
        """Whether the threads belong to this process."""
        return self._pid == os.getpid()  # fork copies only the calling thread

    def submit(self, call: Callable[[int], ResultT]) -> "Future[ResultT]":
        """Queue `call`, which gets the number of its thread; return its future."""
        future: Future[ResultT] = Future()
        self._calls.put((future, call))
        return future

    def close(self) -> None:
        """Cancel queued calls, and wait a limited time for the threads to end."""
        self._finalizer()


def _shut_down(
    calls: _CallQueue, threads: Sequence[threading.Thread], ended: Sequence["Future[None]"], pid: int
) -> None:
    if pid != os.getpid():  # a forked child runs its parent's finalizers too
        return
    try:
        while (queued := calls.get_nowait()) is not None:
            queued[0].cancel()
    except Empty:
        pass
    for _ in threads:  # one end mark for each
        calls.put(None)
    wait(ended, _JOIN_TIMEOUT_S)
    for thread, end in zip(threads, ended, strict=True):
        # The finalizer may run in a thread of the pool, by garbage collection.
        if end.done() and thread is not threading.current_thread():
            thread.join()


def _run_calls(number: int, calls: _CallQueue, started: threading.Barrier, ended: "Future[None]") -> None:
    torch.get_num_threads()  # initializes this thread: otherwise its first computation would reset the value below
    torch.set_num_threads(1)
    started.wait()
    while (queued := calls.get()) is not None:
        future, call = queued
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(call(number))
            except BaseException as error:
                future.set_exception(error)
        del queued, future, call  # so that an idle thread keeps no batch alive
    ended.set_result(None)


def wait_until(is_done: Callable[[float], bool], timeout: Duration, describe_failure: Callable[[], str]) -> None:
    """Call `is_done` with a number of seconds to wait until it returns true.

    Raise `WatchError` with the text of `describe_failure` after `timeout`.
    """
    left_s = timeout.seconds
    while not is_done(min(POLL_S, left_s)):
        left_s -= POLL_S
        if left_s <= 0:
            raise WatchError(describe_failure())


def wait_for_result(future: "Future[FutureT]", timeout: Duration, describe_failure: Callable[[], str]) -> FutureT:
    """Wait for a future as `wait_until` does, and return its result."""
    wait_until(lambda wait_s: bool(wait([future], wait_s).done), timeout, describe_failure)
    return future.result()


class ThreadLoader:
    """Prefetch batches in threads that live until `close`, each batch in one thread.

    Raise a `WatchError` that names the sample if no batch arrives within `timeout`.
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
        self._batch_makers = batch_makers  # one per thread
        self._progress = progress
        self._worker_progress = [progress.for_worker(worker) for worker in range(len(batch_makers))]
        self._pin_memory = pin_memory
        self._timeout = timeout
        self._describe_batch = batch_makers[0].schedule.describe
        self._name_of = name_of
        self._loader_stats = loader_stats
        self._pool: ThreadPool[TimedBatch] | None = None

    def batches(self, first: int, stop: int) -> Iterator[Batch]:
        """Iterate over the batches; each thread prefetches `BATCHES_PER_THREAD` of them."""
        if self._pool is None or not self._pool.is_in_this_process:
            self._pool = ThreadPool(len(self._batch_makers), "loader")
        self._loader_stats.start_workers(len(self._batch_makers))
        prefetched: deque[Future[TimedBatch]] = deque()
        try:
            for number in range(first, stop):
                for following in range(
                    number + len(prefetched), min(stop, number + BATCHES_PER_THREAD * len(self._batch_makers))
                ):
                    prefetched.append(self._pool.submit(partial(self._make, following)))
                self._loader_stats.request_batch(sum(future.done() for future in prefetched))
                made = wait_for_result(prefetched.popleft(), self._timeout, partial(self._describe_hang, number))
                self._loader_stats.deliver_batch(made.timing)
                yield made.batch
        finally:
            for future in prefetched:
                future.cancel()

    def stats(self) -> LoaderResult | None:
        """Return the timing so far."""
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
        worker, position = self._progress.find_worker(number) or (-1, WorkerPosition(-1, number, -1))
        at = f", at sample {position.sample}, {self._name_of(position.sample)}" if position.sample >= 0 else ""
        return (
            f"data.worker_timeout: no batch for {self._timeout}: thread {worker} hangs in "
            f"{self._describe_batch(number)}{at} (check that image and its disk, or raise data.worker_timeout)"
        )
