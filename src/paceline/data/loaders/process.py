"""Loader with worker processes, started and fed by PyTorch's DataLoader."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing import active_children
from multiprocessing.process import BaseProcess
from typing import Any

from torch.utils.data import DataLoader

from paceline.core.errors import PacelineError
from paceline.core.results import LoaderResult
from paceline.core.units import Duration
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


@dataclass(frozen=True)
class ProcessLoader:
    """Prefetch batches in worker processes, each batch in one worker.

    Raise a `WatchError` that names the sample if a worker dies, or no batch arrives within `timeout`.
    """

    batch_maker: BatchMaker
    workers: int
    pin_memory: bool
    timeout: Duration
    progress: WorkerProgress
    name_of: Callable[[int], str]
    loader_stats: LoaderStats

    def batches(self, first: int, stop: int) -> Iterator[Batch]:
        """Iterate over the batches; the workers end with the iterator."""
        dataloader_iter, workers = self._start_workers(first, stop)
        with WorkerSupervisor(
            workers, self.progress, self.timeout, self.batch_maker.schedule.describe, self.name_of
        ) as supervisor:
            try:
                for number in range(first, stop):
                    # Made and not yet delivered.
                    self.loader_stats.request_batch(self.progress.num_made - (number - first))
                    item = supervisor.wait_for(number, dataloader_iter)
                    if isinstance(item, PacelineError):
                        raise item
                    self.loader_stats.deliver_batch(item.timing)
                    yield item.batch
            finally:
                del dataloader_iter  # DataLoader ends its workers; the supervisor kills those that hang

    def stats(self) -> LoaderResult | None:
        """Return the timing so far."""
        return self.loader_stats.build_result()

    def close(self) -> None:
        """Do nothing: workers end with their iterator."""

    def _start_workers(self, first: int, stop: int) -> tuple[Iterator[Any], list[BaseProcess]]:
        # A process forked from one with threads can inherit a lock that is never released: CPython 3.11 takes one
        # before it runs any Python (`_PyThreadState_DeleteExcept`). This is rare: kill the workers, and start again.
        for _ in range(_MAX_START_ATTEMPTS):
            dataloader_iter: Any = None  # a worker that inherits that of a failed attempt prints a traceback
            self.progress.clear()
            self.loader_stats.start_workers(self._num_workers(first, stop))
            # DataLoader has no public list of its processes: they are the children that it adds.
            others = set(active_children())
            with preserve_sigchld_handler():
                dataloader_iter = iter(self._build_dataloader(first, stop))
            workers = [child for child in active_children() if child not in others]
            if wait_for_workers(workers, self.progress, START_TIMEOUT_S):
                break
            for worker in workers:
                worker.kill()
                worker.join()
        return dataloader_iter, workers

    def _num_workers(self, first: int, stop: int) -> int:
        return min(self.workers, max(1, stop - first))

    def _build_dataloader(self, first: int, stop: int) -> "DataLoader[Any]":
        return DataLoader(
            _WorkerDataset(self.batch_maker, self.progress),  # type: ignore[arg-type]
            batch_size=None,  # the dataset makes whole batches
            sampler=range(first, stop),
            num_workers=self._num_workers(first, stop),
            prefetch_factor=BATCHES_PER_WORKER,
            pin_memory=self.pin_memory,
            timeout=POLL_S,
            multiprocessing_context="fork",  # `init_worker` ties a worker to this process by its parent's id
            worker_init_fn=partial(init_worker, os.getpid(), self.progress),
        )


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
