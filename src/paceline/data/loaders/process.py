"""Loader with worker processes, started and fed by PyTorch's DataLoader."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import active_children
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any, cast

import torch
from torch.utils.data import DataLoader

from paceline.core.errors import PacelineError, WatchError
from paceline.core.results import LoaderResult
from paceline.core.units import Duration, count
from paceline.data.batch import Batch
from paceline.data.loaders.batch_maker import BatchMaker, TimedBatch
from paceline.data.timing import LoaderStats
from paceline.data.workers import (
    POLL_S,
    WorkerProgress,
    WorkerSupervisor,
    init_worker,
    preserve_sigchld_handler,
    wait_for_workers,
)

# Batches that each worker prefetches.
BATCHES_PER_WORKER = 2
# Seconds that workers have to start: a hundred times as long as they take.
START_TIMEOUT_S = 10.0
_MAX_START_ATTEMPTS = 4


class ProcessLoader:
    """Prefetch batches in worker processes, each batch in one worker.

    With `keeps_workers`, for batches that depend on their numbers alone, workers that have made all batches of an
    iterator wait for the next one until `close`. Raise a `WatchError` that names the sample if a worker dies, or no
    batch arrives within `timeout`.
    """

    def __init__(
        self,
        batch_maker: BatchMaker,
        workers: int,
        *,
        keeps_workers: bool,
        pin_memory: bool,
        timeout: Duration,
        progress: WorkerProgress,
        name_of: Callable[[int], str],
        loader_stats: LoaderStats,
    ) -> None:
        self._batch_maker = batch_maker
        self._num_workers = workers
        self._keeps_workers = keeps_workers
        self._pin_memory = pin_memory
        self._timeout = timeout
        self._name_of = name_of
        self._loader_stats = loader_stats
        self._idle: _Workers | None = None
        self.progress = progress

    def batches(self, first: int, stop: int) -> Iterator[Batch]:
        """Iterate over the batches; the workers end with an iterator that raises or is abandoned."""
        numbers = range(first, stop)
        workers = self._resume_workers(numbers) or self._start_workers(numbers)
        is_complete = not numbers
        describe_batch = self._batch_maker.schedule.describe
        try:
            with WorkerSupervisor(
                workers.processes, self.progress, self._timeout, describe_batch, self._name_of
            ) as supervisor:
                for number in numbers:
                    # Made and not yet delivered.
                    self._loader_stats.request_batch(self.progress.num_made - (number - first))
                    item = supervisor.wait_for(number, workers.made)
                    if isinstance(item, PacelineError):
                        raise item
                    self._loader_stats.deliver_batch(item.timing)
                    is_complete = number == numbers[-1]  # the workers have nothing left to do
                    yield item.batch
        finally:
            if is_complete and self._keeps_workers and self._idle is None:
                self._idle = workers
            else:
                workers.end()

    def stats(self) -> LoaderResult | None:
        """Return the timing so far."""
        return self._loader_stats.build_result()

    def close(self) -> None:
        """End idle workers; others end with their iterator."""
        if self._idle is not None and self._idle.are_of_this_process:
            self._idle.end()
            self._idle = None

    def _resume_workers(self, numbers: range) -> "_Workers | None":
        """Return the idle workers, which make batches `numbers` from now on, or None if there are none for that."""
        workers = self._idle
        if workers is None or not workers.are_of_this_process:  # a forked child has none of its parent's workers
            return None
        self._idle = None
        if len(workers.processes) == self._count_workers(numbers):
            self.progress.clear_positions()
            self._loader_stats.start_workers(len(workers.processes))
            try:
                workers.resume(numbers)
                return workers
            except (RuntimeError, OSError, EOFError):  # one was killed or stopped while idle: replace them
                workers.kill()
        workers.end()
        return None

    def _start_workers(self, numbers: range) -> "_Workers":
        # A process forked from one with threads can inherit a lock that is never released: CPython 3.11 takes one
        # before it runs any Python (`_PyThreadState_DeleteExcept`). This is rare: kill the workers, and start again.
        for _ in range(_MAX_START_ATTEMPTS):
            self.progress.clear()
            self._loader_stats.start_workers(self._count_workers(numbers))
            workers = _Workers(numbers, self._build_dataloader)
            if wait_for_workers(workers.processes, self.progress, START_TIMEOUT_S):
                return workers
            workers.kill()
            workers.end()  # a worker that inherits the iterator of a failed attempt prints a traceback
        workers_text = count(self._count_workers(numbers), "worker")
        raise WatchError(
            f"data.workers: {workers_text} did not start within {START_TIMEOUT_S:g} s, {_MAX_START_ATTEMPTS} times "
            "in a row (start again, or set data.workers=0)"
        )

    def _count_workers(self, numbers: range) -> int:
        return min(self._num_workers, max(1, len(numbers)))

    def _build_dataloader(self, sampler: "_BatchNumbers") -> "DataLoader[Any]":
        return DataLoader(
            _WorkerDataset(self._batch_maker, self.progress),  # type: ignore[arg-type]
            batch_size=None,  # the dataset makes whole batches
            sampler=sampler,
            num_workers=self._count_workers(sampler.numbers),
            prefetch_factor=BATCHES_PER_WORKER,
            pin_memory=self._pin_memory,
            timeout=POLL_S,
            multiprocessing_context="fork",  # `init_worker` ties a worker to this process by its parent's id
            worker_init_fn=partial(init_worker, os.getpid(), self.progress),
            persistent_workers=True,
            # Otherwise DataLoader draws a seed from the global generator when workers start, but not when they resume.
            generator=torch.Generator() if self._keeps_workers else None,
        )


class _BatchNumbers:
    """Yield the numbers of the batches to make: a DataLoader's sampler, read anew by each of its iterators."""

    def __init__(self, numbers: range) -> None:
        self.numbers = numbers

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers)


class _Workers:
    """Worker processes, and the batches that they have `made`, by an iterator of DataLoader."""

    # Forked, so they share this process's memory, and together keep one copy of the pages that it changes later.
    def __init__(self, numbers: range, build_dataloader: Callable[[_BatchNumbers], "DataLoader[Any]"]) -> None:
        self._pid = os.getpid()
        self._numbers = _BatchNumbers(numbers)
        self._dataloader = build_dataloader(self._numbers)
        # DataLoader has no public list of its processes: they are the children that it adds.
        others = set(active_children())
        with preserve_sigchld_handler():
            self.made = _replace_done_event(iter(self._dataloader))
        self.processes: list[BaseProcess] = [child for child in active_children() if child not in others]
        # Before multiprocessing ends at exit, which would wait for workers that ignore its signal.
        Finalize(self, _kill_processes, (self.processes,), exitpriority=0)

    @property
    def are_of_this_process(self) -> bool:
        """Whether this process has started them."""
        return self._pid == os.getpid()

    def resume(self, numbers: range) -> None:
        """Make batches `numbers`, after all earlier ones. Raise an error of DataLoader if a worker does not answer."""
        self._numbers.numbers = numbers
        self.made = iter(self._dataloader)

    def end(self) -> None:
        """End the processes, and kill those that hang."""
        del self.made, self._dataloader  # by which DataLoader ends its workers
        self.kill()

    def kill(self) -> None:
        """Kill the processes."""
        _kill_processes(self.processes)


class _DoneEvent:
    """The event by which DataLoader ends its workers, without its lock: one that was killed may have held that."""

    def __init__(self, flag: Any) -> None:
        self._flag = flag  # the event's semaphore, which workers only read
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        if not self._is_set:
            self._is_set = True
            self._flag.release()


def _replace_done_event(made: Any) -> Iterator[Any]:
    made._workers_done_event = _DoneEvent(made._workers_done_event._flag)
    return cast(Iterator[Any], made)


def _kill_processes(processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        if process.exitcode is None:  # an iterator that interpreter exit destroys cannot use `signal` any more
            process.kill()
    for process in processes:
        process.join()


@dataclass(frozen=True)
class _WorkerDataset:
    batch_maker: BatchMaker
    progress: WorkerProgress

    # A user error is returned, not raised: DataLoader would wrap it in a traceback.
    def __getitem__(self, number: int) -> TimedBatch | PacelineError:
        self.progress.set_batch(number)
        try:
            made = self.batch_maker.make(number, pin_memory=False)  # pinning would initialize CUDA in the worker
        except PacelineError as error:
            return error
        self.progress.count_batch()
        return made
