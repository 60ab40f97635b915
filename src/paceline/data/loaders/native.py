"""Loader for packs that decodes in threads of the native extension, without running Python per image.

Images that the extension cannot decode (unindexed files, damaged records, shards not on disk) are read and decoded in
Python threads, with the same code and errors as in the other loaders. These threads also augment batches.
"""

import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Final, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.dataset import Source
from paceline.core.results import LoaderResult
from paceline.core.units import Duration
from paceline.data.augment.geometric import BatchFlip
from paceline.data.batch import Batch
from paceline.data.loaders.batch_maker import BatchMaker, TimedBatch
from paceline.data.loaders.reader import ReadSamples
from paceline.data.loaders.thread import ThreadPool, wait_for_result, wait_until
from paceline.data.native import DecodeTask, Pool
from paceline.data.order import BatchSchedule
from paceline.data.pack.format import KIND_RECORD
from paceline.data.pack.shards import Shards
from paceline.data.resize import Resizer
from paceline.data.timing import BatchTimer, BatchTiming, LoaderStats
from paceline.data.workers import POLL_S, WorkerPosition, WorkerProgress


class HostBuffers(Protocol):
    """Allocate host memory."""

    def allocate(self, shape: tuple[int, ...]) -> Tensor:
        """Return uninitialized uint8 of `shape`, exclusive to the caller while any tensor over it is referenced."""
        ...


class PageableHostBuffers:
    """Allocate pageable memory, and reuse it once no batch references it; too small blocks are freed.

    `num_bytes` is the total in use and free.
    """

    # The kernel zeroes fresh memory page by page, which costs a sixth of decoding into it.
    def __init__(self) -> None:
        self._free: list[NDArray[np.uint8]] = []
        self._in_use: list[tuple[weakref.ref[NDArray[np.uint8]], NDArray[np.uint8]]] = []
        self.num_bytes = 0

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
            self.num_bytes -= memory.nbytes
        self.num_bytes += num_bytes
        return np.empty(num_bytes, dtype=np.uint8)


class PinnedHostBuffers:
    """Allocate page-locked memory from torch's caching allocator, which waits for device copies before reuse."""

    def allocate(self, shape: tuple[int, ...]) -> Tensor:
        """Return uint8 of `shape`."""
        return torch.empty(shape, dtype=torch.uint8, pin_memory=True)


def build_host_buffers(*, pin_memory: bool) -> HostBuffers:
    """Build an allocator of page-locked or pageable memory."""
    return PinnedHostBuffers() if pin_memory else PageableHostBuffers()


# Images that are planned together: measured, more are not cheaper, and the wait for the plan grows.
_IMAGES_PER_PLAN: Final = 2048


class RecordSource(Source, Protocol):
    """The attributes of a pack (`pack.reader.PackSource`) that planning needs."""

    @property
    def files(self) -> Shards:
        """The shards."""
        ...

    @property
    def labels(self) -> NDArray[np.integer]:
        """Class numbers, integers [N]."""
        ...

    @property
    def heights(self) -> NDArray[np.integer]:
        """Heights in pixels of the upright images [N]; 0 if unknown."""
        ...

    @property
    def widths(self) -> NDArray[np.integer]:
        """Widths in pixels of the upright images [N]; 0 if unknown."""
        ...

    @property
    def kinds(self) -> NDArray[np.uint8]:
        """Storage kind of each sample, `pack.format.KIND_*` [N]."""
        ...

    def locate(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.uint64], NDArray[np.uint64]]:
        """Return the shard, the offset in its file and the length in bytes of samples, each [n]."""
        ...


class BatchPlan(NamedTuple):
    """A batch as arguments of `native.Pool.submit`; `lengths` is 0 for an image that the extension must not decode.

    `draws` are all draws of the batch. `shard_numbers` indexes `shard_buffers`.
    """

    number: int
    size: int
    indices: NDArray[np.int64]
    draws: NDArray[np.float64]
    shard_buffers: tuple[memoryview | bytes, ...]
    shard_numbers: NDArray[np.int32]
    offsets: NDArray[np.uint64]
    lengths: NDArray[np.uint64]
    boxes: NDArray[np.float64]
    flips: NDArray[np.bool_]
    is_inside: bool


@dataclass(frozen=True)
class BatchPlanner:
    """Plan batches of `schedule` from `source`, resized as by `resizer` and flipped by `flip`."""

    source: RecordSource
    schedule: BatchSchedule
    resizer: Resizer
    flip: BatchFlip | None

    @property
    def num_draws(self) -> int:
        """Number of draws per sample."""
        return self.resizer.num_draws + (self.flip is not None)

    def batches(self, first: int, stop: int) -> Iterator[BatchPlan]:
        """Yield the plans of batches `first` to `stop` - 1; some later batches are planned with the requested one."""
        while first < stop:
            several = max(1, _IMAGES_PER_PLAN // max(1, len(self.schedule.indices(first))))
            planned = self._plan_batches(range(first, min(first + several, stop)))
            first += len(planned)
            yield from planned

    # Planning runs in the main thread, beside the steps. For few images the fixed cost of numpy calls dominates, hence
    # several batches at once.
    def _plan_batches(self, numbers: range) -> list[BatchPlan]:
        """Plan the first of `numbers`, as far as their images have one size."""
        size = self.schedule.size(numbers[0])
        same_size = list(takewhile(lambda number: self.schedule.size(number) == size, numbers))
        batches = [self.schedule.indices(number) for number in same_size]
        indices, draws = np.concatenate(batches), np.concatenate([self.schedule.draws(number) for number in same_size])
        sizes = np.stack([self.source.heights[indices], self.source.widths[indices]], axis=1).astype(np.int64)
        memories, shard_of, offsets, lengths = self._locate_records(indices, sizes)
        regions = self.resizer.compute_regions(np.maximum(sizes, 1), draws[:, : self.resizer.num_draws], size)
        flips = np.zeros(len(indices), dtype=np.bool_)
        if self.flip is not None:
            flips = draws[:, self.resizer.num_draws] < self.flip.p
        ends = np.cumsum([len(batch) for batch in batches]).tolist()
        planned = []
        for number, start, end in zip(same_size, [0, *ends], ends, strict=False):
            rows = slice(start, end)
            location = (memories, shard_of[rows], offsets[rows], lengths[rows])
            crop = (regions.boxes[rows], flips[rows], regions.is_inside)
            planned.append(BatchPlan(number, size, indices[rows], draws[rows], *location, *crop))
        return planned

    def _locate_records(
        self, indices: NDArray[np.int64], sizes: NDArray[np.int64]
    ) -> tuple[tuple[memoryview | bytes, ...], NDArray[np.int32], NDArray[np.uint64], NDArray[np.uint64]]:
        """Return the mapped shards, and shard, offset and length of each sample; length 0 if it is not decodable."""
        shard_of, offsets, lengths = self.source.locate(indices)
        needed, position = np.unique(shard_of, return_inverse=True)
        memories = [self.source.files.memory(shard) for shard in needed.tolist()]
        is_local = np.array([memory is not None for memory in memories], dtype=np.bool_)[position]
        is_decodable = (self.source.kinds[indices] == KIND_RECORD) & (sizes > 0).all(axis=1) & is_local
        mapped = tuple(b"" if memory is None else memory for memory in memories)
        return mapped, position.astype(np.int32), offsets, np.where(is_decodable, lengths, np.uint64(0))


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
        # Evaluation asks for batches in inference mode, and a thread without that mode writes Pillow's images here.
        with torch.inference_mode(False):
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
        _, position = self._progress.find_worker(planned.number) or (-1, WorkerPosition(-1, -1, -1))
        sample = position.sample if pending.task.done else next(iter(undecoded.tolist()), -1)
        at = f", at sample {sample}, {self._planner.source.name_of(sample)}" if sample >= 0 else ""
        return (
            f"data.worker_timeout: no batch for {self._timeout}: the native loader hangs in "
            f"{self._planner.schedule.describe(planned.number)}{at} (check that image and its disk, or raise "
            f"data.worker_timeout)"
        )
