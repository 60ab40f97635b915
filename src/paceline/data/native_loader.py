"""Loader for packs that decodes in threads of the native extension, without running Python per image.

Images that the extension cannot decode (unindexed files, damaged records, shards not on disk) are read and decoded in
Python threads, with the same code and errors as in the other loaders. These threads also augment batches.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.results import LoaderResult
from paceline.core.units import Duration
from paceline.data.batch import Batch
from paceline.data.batches import Batches, Made
from paceline.data.hands import Hands
from paceline.data.laps import Laps, Work
from paceline.data.native import Pool, Task
from paceline.data.native_plan import Planned, Planner
from paceline.data.reader import Samples
from paceline.data.slots import Slots
from paceline.data.tally import Tally
from paceline.data.waiting import poll, result
from paceline.data.workers import POLL_S, Spot, Trail

# Batches that are prefetched.
AHEAD: Final = 4
_UNDECODED: Final = -1


@dataclass(frozen=True)
class Pending:
    """A batch in work: `task` writes `images`, uint8 [N, C, size, size].

    `status`, int32 [N], is 0 for a decoded image. `future` is the work in a Python thread, if the batch needs any.
    """

    planned: Planned
    images: Tensor
    status: NDArray[np.int32]
    task: Task
    planning: Work
    future: Future[Made] | None = None

    @property
    def is_ready(self) -> bool:
        """Whether the batch can be handed out without waiting."""
        return self.future.done() if self.future else self.task.done


@dataclass(frozen=True)
class Finisher:
    """Finish batches that the native extension has decoded: read undecoded images, augment and pin.

    `batches` is the batch maker that a Python loader would use. Its timer allows one batch at a time.
    """

    batches: Batches
    labels: NDArray[np.integer]
    num_draws: int
    pin_memory: bool

    def __call__(self, pending: Pending) -> Made:
        """Return the finished batch and its timing."""
        planned, timer = pending.planned, self.batches.laps
        timer.begin()
        batch = self.batches.changed(planned.indices, planned.draws[:, self.num_draws :], self._samples(pending))
        if self.pin_memory:
            batch = batch.pin_memory()
        work = timer.finish(len(batch), batch.images.nbytes).plus(pending.planning)
        read_bytes = work.bytes_read + int(planned.lengths.sum())
        return Made(batch, work._replace(decode_s=work.decode_s + pending.task.seconds, bytes_read=read_bytes))

    def _samples(self, pending: Pending) -> Samples:
        planned = pending.planned
        labels = torch.from_numpy(self.labels[planned.indices].astype(np.int64))
        samples = Samples(pending.images, labels, np.ones(len(labels), dtype=np.bool_))
        rows = np.flatnonzero(pending.status)
        return self._patched(samples, planned, rows) if len(rows) else samples

    def _patched(self, samples: Samples, planned: Planned, rows: NDArray[np.int64]) -> Samples:
        """Return `samples` with the images at `rows` read in Python, or dropped."""
        images, labels, is_kept, _ = samples
        reader = self.batches.reader
        read = reader.read(planned.indices[rows], planned.draws[rows, : reader.num_draws], planned.size)
        filled = torch.from_numpy(rows[read.kept])
        is_flipped = torch.from_numpy(planned.flips)[filled][:, None, None, None]
        images[filled] = torch.where(is_flipped, read.images.flip(3), read.images)
        labels[filled] = read.labels
        is_kept[rows[~read.kept]] = False
        if is_kept.all():
            return Samples(images, labels, is_kept, read.bad)
        mask = torch.from_numpy(is_kept)
        return Samples(images[mask], labels[mask], is_kept, read.bad)


class NativeLoader:
    """Prefetch batches in the threads of a native pool, and hand them out in order.

    `make_pool` starts the pool with the first batch; it lives until `close`. All `finishers` but the last run in Python
    threads; the last runs in the main thread, for batches that need no Python work. If no batch arrives within
    `timeout`, raise a `WatchError` that names the image.
    """

    def __init__(
        self,
        planner: Planner,
        finishers: Sequence[Finisher],
        make_pool: Callable[[], Pool],
        slots: Slots,
        *,
        timeout: Duration,
        trail: Trail,
        tally: Tally,
        laps: Laps,
    ) -> None:
        self._planner = planner
        self._finishers = finishers
        self._make_pool = make_pool
        self._slots = slots
        self._timeout = timeout
        self._trail = trail
        self._trails = [trail.of(worker) for worker in range(len(finishers))]
        self._tally = tally
        self._laps = laps
        self._workers = len(finishers) - 1
        self._pid = -1
        self._pool: Pool | None = None
        self._hands: Hands[Made] | None = None

    def batches(self, first: int, stop: int) -> Iterator[Batch]:
        """Return an iterator over the batches; it prefetches `AHEAD` of them."""
        pool = self._own_pool()
        self._tally.start(self._workers)
        planned = self._planner.batches(first, stop)
        ahead: deque[Pending] = deque()
        try:
            for number in range(first, stop):
                for _ in range(min(AHEAD, stop - number) - len(ahead)):
                    ahead.append(self._submitted(pool, planned))
                self._tally.ask(sum(pending.is_ready for pending in ahead))
                made = self._made(ahead.popleft())
                self._tally.hand(made.work)
                yield made.batch
        finally:
            for pending in ahead:
                if pending.future:
                    pending.future.cancel()

    def stats(self) -> LoaderResult | None:
        """Return the timing of all batches so far."""
        return self._tally.stats()

    def close(self) -> None:
        """End all threads. Batches handed out stay valid."""
        if self._pool is not None and self._pid == os.getpid():
            self._pool.close()
        self._pool = None
        if self._hands is not None:
            self._hands.close()
        self._hands = None

    def _own_pool(self) -> Pool:
        if self._pool is None or self._pid != os.getpid():  # a forked child has none of its parent's threads
            self._hands = None
            self._pool, self._pid = self._make_pool(), os.getpid()
        return self._pool

    def _own_hands(self) -> Hands[Made]:
        if self._hands is None:
            self._hands = Hands(self._workers, "loader")
        return self._hands

    def _submitted(self, pool: Pool, batches: Iterator[Planned]) -> Pending:
        self._laps.begin()
        planned = next(batches)
        self._laps.lap("augment")
        channels = self._planner.source.info.channels
        images = self._slots.take((len(planned.indices), channels, planned.size, planned.size))
        status = np.full(len(planned.indices), _UNDECODED, dtype=np.int32)
        task = pool.submit(
            planned.memories,
            planned.shard_of,
            planned.offsets,
            planned.lengths,
            planned.boxes,
            planned.flips,
            planned.inside,
            planned.size,
            channels,
            images.numpy(),
            status,
        )
        pending = Pending(planned, images, status, task, self._laps.finish(0, 0))
        if not (self._finishers[-1].batches.changes or (planned.lengths == 0).any()):
            return pending
        future = self._own_hands().submit(partial(self._finish, pending))
        return Pending(planned, images, status, task, pending.planning, future)

    def _finish(self, pending: Pending, worker: int) -> Made:
        while not pending.task.wait(POLL_S):  # raises if the pool is closed
            pass
        self._trails[worker].batch(pending.planned.number)
        return self._finishers[worker](pending)

    def _made(self, pending: Pending) -> Made:
        hang = partial(self._hang, pending)
        if pending.future:
            return result(pending.future, self._timeout, hang)
        was_ready = pending.task.done
        poll(pending.task.wait, self._timeout, hang)
        made = self._finishers[-1](pending)
        # Finishing in the main thread would count as a batch that was not ready in time.
        return made._replace(work=made.work._replace(made_s=0.0)) if was_ready else made

    def _hang(self, pending: Pending) -> str:
        planned = pending.planned
        # The extension does not report what it decodes at the moment, only which images are not decoded yet.
        undecoded = planned.indices[(pending.status == _UNDECODED) & (planned.lengths > 0)]
        _, spot = self._trail.who_is_at(planned.number) or (-1, Spot(-1, -1, -1))
        sample = spot.sample if pending.task.done else next(iter(undecoded.tolist()), -1)
        at = f", at sample {sample}, {self._planner.source.name_of(sample)}" if sample >= 0 else ""
        return (
            f"data.worker_timeout: no batch for {self._timeout}: the native loader hangs in "
            f"{self._planner.schedule.title(planned.number)}{at} (check that image and its disk, or raise "
            f"data.worker_timeout)"
        )
