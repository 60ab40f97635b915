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
from paceline.data.batches import BatchMaker, TimedBatch
from paceline.data.hands import ThreadPool
from paceline.data.laps import BatchTimer, BatchTiming
from paceline.data.native import DecodeTask, Pool
from paceline.data.native_plan import BatchPlan, BatchPlanner
from paceline.data.reader import ReadSamples
from paceline.data.slots import HostBuffers
from paceline.data.tally import LoaderStats
from paceline.data.waiting import wait_for_result, wait_until
from paceline.data.workers import POLL_S, WorkerPosition, WorkerProgress

# Batches that are prefetched.
BATCHES_AHEAD: Final = 4
_UNDECODED: Final = -1


@dataclass(frozen=True)
class PendingBatch:
    """A batch in work: `task` writes `images`, uint8 [N, C, size, size].

    `status`, int32 [N], is 0 for a decoded image. `future` is the work in a Python thread, if the batch needs any.
    """

    plan: BatchPlan
    images: Tensor
    status: NDArray[np.int32]
    task: DecodeTask
    planning_time: BatchTiming
    future: Future[TimedBatch] | None = None

    @property
    def is_ready(self) -> bool:
        """Whether the batch can be handed out without waiting."""
        return self.future.done() if self.future else self.task.done


@dataclass(frozen=True)
class BatchFinisher:
    """Finish batches that the native extension has decoded: read undecoded images, augment and pin.

    `batch_maker` is the batch maker that a Python loader would use. Its timer allows one batch at a time.
    """

    batch_maker: BatchMaker
    labels: NDArray[np.integer]
    num_draws: int
    pin_memory: bool

    def __call__(self, pending: PendingBatch) -> TimedBatch:
        """Return the finished batch and its timing."""
        planned, timer = pending.plan, self.batch_maker.timer
        timer.start()
        batch = self.batch_maker.augment(
            planned.indices, planned.draws[:, self.num_draws :], self._collect_samples(pending)
        )
        if self.pin_memory:
            batch = batch.pin_memory()
        work = timer.finish(len(batch), batch.images.nbytes).add(pending.planning_time)
        read_bytes = work.bytes_read + int(planned.lengths.sum())
        return TimedBatch(batch, work._replace(decode_s=work.decode_s + pending.task.seconds, bytes_read=read_bytes))

    def _collect_samples(self, pending: PendingBatch) -> ReadSamples:
        planned = pending.plan
        labels = torch.from_numpy(self.labels[planned.indices].astype(np.int64))
        samples = ReadSamples(pending.images, labels, np.ones(len(labels), dtype=np.bool_))
        rows = np.flatnonzero(pending.status)
        return self._read_undecoded(samples, planned, rows) if len(rows) else samples

    def _read_undecoded(self, samples: ReadSamples, planned: BatchPlan, rows: NDArray[np.int64]) -> ReadSamples:
        """Return `samples` with the images at `rows` read in Python, or dropped."""
        images, labels, is_kept, _ = samples
        reader = self.batch_maker.reader
        read = reader.read(planned.indices[rows], planned.draws[rows, : reader.num_draws], planned.size)
        filled = torch.from_numpy(rows[read.is_kept])
        is_flipped = torch.from_numpy(planned.flips)[filled][:, None, None, None]
        images[filled] = torch.where(is_flipped, read.images.flip(3), read.images)
        labels[filled] = read.labels
        is_kept[rows[~read.is_kept]] = False
        if is_kept.all():
            return ReadSamples(images, labels, is_kept, read.bad)
        mask = torch.from_numpy(is_kept)
        return ReadSamples(images[mask], labels[mask], is_kept, read.bad)


class NativeLoader:
    """Prefetch batches in the threads of a native pool, and hand them out in order.

    `make_pool` starts the pool with the first batch; it lives until `close`. All `finishers` but the last run in Python
    threads; the last runs in the main thread, for batches that need no Python work. If no batch arrives within
    `timeout`, raise a `WatchError` that names the image.
    """

    def __init__(
        self,
        planner: BatchPlanner,
        finishers: Sequence[BatchFinisher],
        make_pool: Callable[[], Pool],
        buffers: HostBuffers,
        *,
        timeout: Duration,
        progress: WorkerProgress,
        loader_stats: LoaderStats,
        timer: BatchTimer,
    ) -> None:
        self._planner = planner
        self._finishers = finishers
        self._make_pool = make_pool
        self._buffers = buffers
        self._timeout = timeout
        self._progress = progress
        self._worker_progress = [progress.for_worker(worker) for worker in range(len(finishers))]
        self._loader_stats = loader_stats
        self._timer = timer
        self._workers = len(finishers) - 1
        self._pid = -1
        self._pool: Pool | None = None
        self._threads: ThreadPool[TimedBatch] | None = None

    def batches(self, first: int, stop: int) -> Iterator[Batch]:
        """Return an iterator over the batches; it prefetches `BATCHES_AHEAD` of them."""
        pool = self._get_pool()
        self._loader_stats.start_workers(self._workers)
        planned = self._planner.batches(first, stop)
        ahead: deque[PendingBatch] = deque()
        try:
            for number in range(first, stop):
                for _ in range(min(BATCHES_AHEAD, stop - number) - len(ahead)):
                    ahead.append(self._submit_next(pool, planned))
                self._loader_stats.request_batch(sum(pending.is_ready for pending in ahead))
                made = self._wait_for_batch(ahead.popleft())
                self._loader_stats.deliver_batch(made.timing)
                yield made.batch
        finally:
            for pending in ahead:
                if pending.future:
                    pending.future.cancel()

    def stats(self) -> LoaderResult | None:
        """Return the timing of all batches so far."""
        return self._loader_stats.build_result()

    def close(self) -> None:
        """End all threads. Batches handed out stay valid."""
        if self._pool is not None and self._pid == os.getpid():
            self._pool.close()
        self._pool = None
        if self._threads is not None:
            self._threads.close()
        self._threads = None

    def _get_pool(self) -> Pool:
        if self._pool is None or self._pid != os.getpid():  # a forked child has none of its parent's threads
            self._threads = None
            self._pool, self._pid = self._make_pool(), os.getpid()
        return self._pool

    def _get_threads(self) -> ThreadPool[TimedBatch]:
        if self._threads is None:
            self._threads = ThreadPool(self._workers, "loader")
        return self._threads

    def _submit_next(self, pool: Pool, batches: Iterator[BatchPlan]) -> PendingBatch:
        self._timer.start()
        planned = next(batches)
        self._timer.end_stage("augment")
        channels = self._planner.source.info.channels
        images = self._buffers.allocate((len(planned.indices), channels, planned.size, planned.size))
        status = np.full(len(planned.indices), _UNDECODED, dtype=np.int32)
        task = pool.submit(
            planned.shard_buffers,
            planned.shard_numbers,
            planned.offsets,
            planned.lengths,
            planned.boxes,
            planned.flips,
            planned.is_inside,
            planned.size,
            channels,
            images.numpy(),
            status,
        )
        pending = PendingBatch(planned, images, status, task, self._timer.finish(0, 0))
        if not (self._finishers[-1].batch_maker.changes or (planned.lengths == 0).any()):
            return pending
        future = self._get_threads().submit(partial(self._finish, pending))
        return PendingBatch(planned, images, status, task, pending.planning_time, future)

    def _finish(self, pending: PendingBatch, worker: int) -> TimedBatch:
        while not pending.task.wait(POLL_S):  # raises if the pool is closed
            pass
        self._worker_progress[worker].set_batch(pending.plan.number)
        return self._finishers[worker](pending)

    def _wait_for_batch(self, pending: PendingBatch) -> TimedBatch:
        hang = partial(self._describe_hang, pending)
        if pending.future:
            return wait_for_result(pending.future, self._timeout, hang)
        was_ready = pending.task.done
        wait_until(pending.task.wait, self._timeout, hang)
        made = self._finishers[-1](pending)
        # Finishing in the main thread would count as a batch that was not ready in time.
        return made._replace(timing=made.timing._replace(made_s=0.0)) if was_ready else made

    def _describe_hang(self, pending: PendingBatch) -> str:
        planned = pending.plan
        # The extension does not report what it decodes at the moment, only which images are not decoded yet.
        undecoded = planned.indices[(pending.status == _UNDECODED) & (planned.lengths > 0)]
        _, spot = self._progress.find_worker(planned.number) or (-1, WorkerPosition(-1, -1, -1))
        sample = spot.sample if pending.task.done else next(iter(undecoded.tolist()), -1)
        at = f", at sample {sample}, {self._planner.source.name_of(sample)}" if sample >= 0 else ""
        return (
            f"data.worker_timeout: no batch for {self._timeout}: the native loader hangs in "
            f"{self._planner.schedule.describe(planned.number)}{at} (check that image and its disk, or raise "
            f"data.worker_timeout)"
        )
