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
from paceline.data.batches import Batches, Made
from paceline.data.tally import Tally
from paceline.data.workers import POLL_S, Crew, Trail, enter_crew, has_entered, own_child_signals

# Batches that each worker prefetches.
PREFETCH = 2
# Seconds that workers have to start: a hundred times what they need.
BORN_S = 10.0
_BIRTHS = 4


@dataclass(frozen=True)
class WorkerLoader:
    """Prefetch batches in worker processes, each batch in one worker.

    If a worker dies, or no batch arrives within `timeout`, raise a `WatchError` that names the sample.
    """

    dataset: Batches
    workers: int
    pin_memory: bool
    timeout: Duration
    trail: Trail
    name_of: Callable[[int], str]
    tally: Tally

    def batches(self, first: int, stop: int) -> Iterator[Batch]:
        """Return an iterator over the batches; the workers end with it."""
        ahead, workers = self._start(first, stop)
        with Crew(workers, self.trail, self.timeout, self.dataset.schedule.title, self.name_of) as supervisor:
            try:
                for number in range(first, stop):
                    self.tally.ask(self.trail.num_made - (number - first))
                    item = supervisor.wait_for(number, ahead)
                    if isinstance(item, PacelineError):
                        raise item
                    self.tally.hand(item.work)
                    yield item.batch
            finally:
                del ahead  # DataLoader asks its workers to end; the supervisor kills one that hangs

    def stats(self) -> LoaderResult | None:
        """Return the timing of all batches so far."""
        return self.tally.stats()

    def close(self) -> None:
        """Do nothing: workers end with their iterator."""

    def _start(self, first: int, stop: int) -> tuple[Iterator[Any], list[BaseProcess]]:
        """Start the workers; if one does not come up, kill them and start new ones."""
        # A process forked from one with threads can inherit a held lock that nobody will release: CPython 3.11 takes a
        # lock before it runs any Python (`_PyThreadState_DeleteExcept`). This is rare, hence the retry.
        for _ in range(_BIRTHS):
            self.trail.clear()
            self.tally.start(self._num_workers(first, stop))
            others = set(active_children())
            with own_child_signals():
                ahead = iter(self._loader(first, stop))
            workers = [child for child in active_children() if child not in others]
            if has_entered(workers, self.trail, BORN_S):
                break
            for worker in workers:
                worker.kill()
                worker.join()
        return ahead, workers

    def _num_workers(self, first: int, stop: int) -> int:
        return min(self.workers, max(1, stop - first))

    def _loader(self, first: int, stop: int) -> "DataLoader[Any]":
        return DataLoader(
            _Carried(self.dataset, self.trail),  # type: ignore[arg-type]
            batch_size=None,
            sampler=range(first, stop),
            num_workers=self._num_workers(first, stop),
            prefetch_factor=PREFETCH,
            pin_memory=self.pin_memory,
            timeout=POLL_S,
            multiprocessing_context="fork",  # `enter_crew` ties a worker to this process by its parent's id
            worker_init_fn=partial(enter_crew, os.getpid(), self.trail),
        )


@dataclass(frozen=True)
class _Carried:
    """Return a user error from a worker as a value: DataLoader would wrap it in a traceback."""

    dataset: Batches
    trail: Trail

    def __getitem__(self, number: int) -> Made | PacelineError:
        self.trail.batch(number)
        try:
            made = self.dataset.make(number, pin_memory=False)  # pinning needs CUDA, which a worker must not initialize
        except PacelineError as error:
            return error
        self.trail.made()
        return made
