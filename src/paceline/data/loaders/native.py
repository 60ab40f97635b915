"""Loader for JPEGs that decodes in threads of the native extension, without running Python per image.

Python threads augment, and decode what the extension cannot (files of other formats, damaged records, shards not on
disk) with the code and errors of the other loaders.
"""

import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.results import LoaderResult
from paceline.core.units import Duration
from paceline.data.batch import Batch
from paceline.data.loaders.batch_maker import BatchMaker, TimedBatch
from paceline.data.loaders.native_plan import BatchPlan, BatchPlanner, DecodeTask
from paceline.data.loaders.reader import ReadSamples
from paceline.data.loaders.thread import ThreadPool, wait_for_result, wait_until
from paceline.data.timing import BatchTimer, BatchTiming, LoaderStats
from paceline.data.workers import POLL_S, WorkerPosition, WorkerProgress

if TYPE_CHECKING:
    from paceline.data._native import Pool

# Batches that are prefetched.
BATCHES_AHEAD: Final = 4
# Initial status of an image; the extension writes other values.
_UNDECODED: Final = -1


# Return uninitialized uint8 of a shape, not reused while any tensor over it is referenced.
Allocate = Callable[[tuple[int, ...]], Tensor]


class PageableBuffers:
    """Allocate pageable memory, and reuse it once no batch references it."""

    # Reused, because the kernel zeroes fresh memory page by page, which costs a sixth of decoding into it.
    def __init__(self) -> None:
        self._free: list[NDArray[np.uint8]] = []
        self._in_use: list[tuple[weakref.ref[NDArray[np.uint8]], NDArray[np.uint8]]] = []
        self.num_bytes = 0  # in use and free

    def allocate(self, shape: tuple[int, ...]) -> Tensor:
        """Return uint8 of `shape`."""
        self._reclaim()
        num_bytes = int(np.prod(shape))
        memory = self._get_memory(num_bytes)
        view = memory[:num_bytes].reshape(shape)
        # Every tensor over the memory references this view, so the view dies with the last of them.
        self._in_use.append((weakref.ref(view), memory))
        return torch.from_numpy(view)

    def _reclaim(self) -> None:
        still_in_use = [(view, memory) for view, memory in self._in_use if view() is not None]
        if len(still_in_use) < len(self._in_use):
            self._free += [memory for view, memory in self._in_use if view() is None]
            self._in_use = still_in_use

    def _get_memory(self, num_bytes: int) -> NDArray[np.uint8]:
        while self._free:
            memory = self._free.pop()
            if memory.nbytes >= num_bytes:
                return memory
            self.num_bytes -= memory.nbytes  # too small, as after a larger image size: free it
        self.num_bytes += num_bytes
        return np.empty(num_bytes, dtype=np.uint8)


def allocate_pinned(shape: tuple[int, ...]) -> Tensor:
    """Return page-locked uint8 of `shape`."""
    # torch's caching allocator waits for device copies before it reuses a block.
    return torch.empty(shape, dtype=torch.uint8, pin_memory=True)


@dataclass(frozen=True)
class PendingBatch:
    """A submitted batch: `task` writes `images`, uint8 [N, C, size, size].

    `status`, int32 [N], is 0 for a decoded image. `future` is the work in a Python thread, if any.
    """

    plan: BatchPlan
    images: Tensor
    status: NDArray[np.int32]
    task: DecodeTask
    planning_time: BatchTiming
    future: Future[TimedBatch] | None = None

    @property
    def is_ready(self) -> bool:
        """Whether the batch can be delivered without waiting."""
        return self.future.done() if self.future else self.task.done


@dataclass(frozen=True)
class BatchFinisher:
    """Finish decoded batches: read undecoded images in Python, augment and pin. One batch at a time."""

    batch_maker: BatchMaker
    labels: NDArray[np.integer]
    num_draws: int
    pin_memory: bool

    def __call__(self, pending: PendingBatch) -> TimedBatch:
        """Return the finished batch and its timing."""
        plan, timer = pending.plan, self.batch_maker.timer
        timer.start()
        batch = self.batch_maker.augment(plan.indices, plan.draws[:, self.num_draws :], self._collect_samples(pending))
        if self.pin_memory:
            batch = batch.pin_memory()
        work = timer.finish(len(batch), batch.images.nbytes).add(pending.planning_time)
        read_bytes = work.bytes_read + plan.located.num_bytes
        return TimedBatch(batch, work._replace(decode_s=work.decode_s + pending.task.seconds, bytes_read=read_bytes))

    def _collect_samples(self, pending: PendingBatch) -> ReadSamples:
        plan = pending.plan
        labels = torch.from_numpy(self.labels[plan.indices].astype(np.int64))
        samples = ReadSamples(pending.images, labels, np.ones(len(labels), dtype=np.bool_))
        rows = np.flatnonzero(pending.status)
        return self._read_undecoded(samples, plan, rows) if len(rows) else samples

    def _read_undecoded(self, samples: ReadSamples, plan: BatchPlan, rows: NDArray[np.int64]) -> ReadSamples:
        images, labels, is_kept, _ = samples
        reader = self.batch_maker.reader
        read = reader.read(plan.indices[rows], plan.draws[rows, : reader.num_draws], plan.size)
        filled = torch.from_numpy(rows[read.is_kept])
        # The reader does not flip; the extension does.
        is_flipped = torch.from_numpy(plan.flips)[filled][:, None, None, None]
        images[filled] = torch.where(is_flipped, read.images.flip(3), read.images)
        labels[filled] = read.labels
        is_kept[rows[~read.is_kept]] = False
        if is_kept.all():
            return ReadSamples(images, labels, is_kept, read.bad)
        mask = torch.from_numpy(is_kept)
        return ReadSamples(images[mask], labels[mask], is_kept, read.bad)


class NativeLoader:
    """Decode batches in the threads of a native pool, ahead of training.

    Raise a `WatchError` that names the image if no batch arrives within `timeout`.
    """

    def __init__(
        self,
        planner: BatchPlanner,
        finishers: Sequence[BatchFinisher],
        make_pool: Callable[[], "Pool"],
        allocate: Allocate,
        *,
        timeout: Duration,
        progress: WorkerProgress,
        loader_stats: LoaderStats,
        timer: BatchTimer,
    ) -> None:
        self._planner = planner
        self._finishers = finishers  # one per Python thread, and the last one for the main thread
        self._make_pool = make_pool  # called for the first batch; the pool lives until `close`
        self._allocate = allocate
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
        """Iterate over the batches; it prefetches `BATCHES_AHEAD` of them."""
        pool = self._get_pool()
        self._loader_stats.start_workers(self._workers)
        self._planner.images.start(pool)
        plans = self._planner.batches(first, stop)
        prefetched: deque[PendingBatch] = deque()
        try:
            for number in range(first, stop):
                for _ in range(min(BATCHES_AHEAD, stop - number) - len(prefetched)):
                    prefetched.append(self._submit_next(pool, plans))
                self._loader_stats.request_batch(sum(pending.is_ready for pending in prefetched))
                made = self._wait_for_batch(prefetched.popleft())
                self._loader_stats.deliver_batch(made.timing)
                yield made.batch
        finally:
            for pending in prefetched:
                if pending.future:
                    pending.future.cancel()
            self._planner.images.finish()

    def stats(self) -> LoaderResult | None:
        """Return the timing so far."""
        return self._loader_stats.build_result()

    def close(self) -> None:
        """End all threads."""
        is_own = self._pool is not None and self._pid == os.getpid()  # not usable in a forked child
        if self._pool is not None and is_own:
            self._pool.close()
        self._pool = None
        if self._threads is not None:
            self._threads.close()
        self._threads = None
        if is_own:
            self._planner.images.finish()  # the threads may have decoded longer than the iteration lasted

    def _get_pool(self) -> "Pool":
        if self._pool is None or self._pid != os.getpid():  # a forked child has none of its parent's threads
            self._threads = None
            self._pool, self._pid = self._make_pool(), os.getpid()
        return self._pool

    def _get_threads(self) -> ThreadPool[TimedBatch]:
        if self._threads is None:
            self._threads = ThreadPool(self._workers, "loader")
        return self._threads

    def _submit_next(self, pool: "Pool", plans: Iterator[BatchPlan]) -> PendingBatch:
        self._timer.start()
        plan = next(plans)
        self._timer.end_stage("augment")
        channels = self._planner.source.info.channels
        # Evaluation requests batches in inference mode, and threads without that mode write Pillow's images here.
        with torch.inference_mode(False):
            images = self._allocate((len(plan.indices), channels, plan.size, plan.size))
        status = np.full(len(plan.indices), _UNDECODED, dtype=np.int32)
        task = plan.located.submit(pool, plan, self._planner.resizer, images, status)
        pending = PendingBatch(plan, images, status, task, self._timer.finish(0, 0))
        # The main thread finishes a batch that needs no Python per image.
        if not (self._finishers[-1].batch_maker.changes or plan.located.may_need_python):
            return pending
        future = self._get_threads().submit(partial(self._finish, pending))
        return PendingBatch(plan, images, status, task, pending.planning_time, future)

    def _finish(self, pending: PendingBatch, worker: int) -> TimedBatch:
        while not pending.task.wait(POLL_S):  # raises if the pool is closed
            pass
        self._worker_progress[worker].set_batch(pending.plan.number)
        return self._finishers[worker](pending)

    def _wait_for_batch(self, pending: PendingBatch) -> TimedBatch:
        describe_hang = partial(self._describe_hang, pending)
        if pending.future:
            return wait_for_result(pending.future, self._timeout, describe_hang)
        was_ready = pending.task.done
        wait_until(pending.task.wait, self._timeout, describe_hang)
        made = self._finishers[-1](pending)
        # The main thread finishes it only now, which must not count as a batch that was not ready.
        return made._replace(timing=made.timing._replace(finished_at_s=0.0)) if was_ready else made

    def _describe_hang(self, pending: PendingBatch) -> str:
        plan = pending.plan
        # The extension does not report the images in progress, only which ones are not decoded yet.
        undecoded = plan.indices[(pending.status == _UNDECODED) & plan.located.is_decodable]
        _, position = self._progress.find_worker(plan.number) or (-1, WorkerPosition(-1, -1, -1))
        sample = position.sample if pending.task.done else next(iter(undecoded.tolist()), -1)
        at = f", at sample {sample}, {self._planner.source.name_of(sample)}" if sample >= 0 else ""
        return (
            f"data.worker_timeout: no batch for {self._timeout}: the native loader hangs in "
            f"{self._planner.schedule.describe(plan.number)}{at} (check that image and its disk, or raise "
            f"data.worker_timeout)"
        )
