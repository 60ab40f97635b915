"""Plan the batches of the native loader, several at once, with numpy."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.core.dataset import Source
from paceline.data.augment.geometry import BatchFlip
from paceline.data.pack.format import KIND_RECORD
from paceline.data.pack.shards import Shards
from paceline.data.schedule import BatchSchedule
from paceline.data.sizing import Resizer

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
