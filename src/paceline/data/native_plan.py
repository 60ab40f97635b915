"""What the native core is to do for each batch, worked out for several at once: numpy only, and nothing is decoded.

Planning is done in the rank's own thread, beside the steps: for one batch of few images, calling numpy is most of what
it costs, so batches are planned together.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.core.dataset import Source
from paceline.data.augment.geometry import Flip
from paceline.data.pack.format import KIND_RECORD
from paceline.data.pack.shards import Shards
from paceline.data.schedule import Schedule
from paceline.data.sizing import Sizing

_AT_ONCE: Final = 2048
"""Images that are planned at once: measured, more are not cheaper, and the wait for them grows."""


class Records(Source, Protocol):
    """What is asked of a pack (`pack.reader.PackSource`): facts of each sample, and where its bytes are."""

    @property
    def files(self) -> Shards:
        """The shards."""
        ...

    @property
    def labels(self) -> NDArray[np.integer]:
        """Class numbers [N]."""
        ...

    @property
    def heights(self) -> NDArray[np.integer]:
        """Heights of the upright images [N]; 0 where unknown."""
        ...

    @property
    def widths(self) -> NDArray[np.integer]:
        """Widths of the upright images [N]; 0 where unknown."""
        ...

    @property
    def kinds(self) -> NDArray[np.uint8]:
        """What each sample is stored as, `pack.format.KIND_*` [N]."""
        ...

    def locate(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.uint64], NDArray[np.uint64]]:
        """Return the shard, the offset in its file and the length of samples, each [n]."""
        ...


class Planned(NamedTuple):
    """A batch: what a `native.Pool` is given, of which `lengths` is 0 where the core is to leave an image alone.

    `draws` are all of the batch's; `memories` are the shards that `shard_of` counts.
    """

    number: int
    size: int
    indices: NDArray[np.int64]
    draws: NDArray[np.float64]
    memories: tuple[memoryview | bytes, ...]
    shard_of: NDArray[np.int32]
    offsets: NDArray[np.uint64]
    lengths: NDArray[np.uint64]
    boxes: NDArray[np.float64]
    flips: NDArray[np.bool_]
    inside: bool


@dataclass(frozen=True)
class Planner:
    """Plan batches of `schedule` from `source`: sized as by `sizing`, and mirrored on the way by `flip`."""

    source: Records
    schedule: Schedule
    sizing: Sizing
    flip: Flip | None

    @property
    def num_draws(self) -> int:
        """How many draws a sample uses."""
        return self.sizing.num_draws + (self.flip is not None)

    def batches(self, first: int, stop: int) -> Iterator[Planned]:
        """Yield batches `first` to `stop` - 1, planned when they are asked for, and some of those that follow."""
        while first < stop:
            several = max(1, _AT_ONCE // max(1, len(self.schedule.indices(first))))
            planned = self._together(range(first, min(first + several, stop)))
            first += len(planned)
            yield from planned

    def _together(self, numbers: range) -> list[Planned]:
        """Return the plans of the first of `numbers`, as far as their images have one size."""
        size = self.schedule.size(numbers[0])
        alike = list(takewhile(lambda number: self.schedule.size(number) == size, numbers))
        each = [self.schedule.indices(number) for number in alike]
        indices, draws = np.concatenate(each), np.concatenate([self.schedule.draws(number) for number in alike])
        sizes = np.stack([self.source.heights[indices], self.source.widths[indices]], axis=1).astype(np.int64)
        memories, shard_of, offsets, lengths = self._located(indices, sizes)
        regions = self.sizing.regions(np.maximum(sizes, 1), draws[:, : self.sizing.num_draws], size)
        flips = np.zeros(len(indices), dtype=np.bool_)
        if self.flip is not None:
            flips = draws[:, self.sizing.num_draws] < self.flip.p
        ends = np.cumsum([len(own) for own in each]).tolist()
        planned = []
        for number, start, end in zip(alike, [0, *ends], ends, strict=False):
            part = slice(start, end)
            where = (memories, shard_of[part], offsets[part], lengths[part])
            what = (regions.boxes[part], flips[part], regions.inside)
            planned.append(Planned(number, size, indices[part], draws[part], *where, *what))
        return planned

    def _located(
        self, indices: NDArray[np.int64], sizes: NDArray[np.int64]
    ) -> tuple[tuple[memoryview | bytes, ...], NDArray[np.int32], NDArray[np.uint64], NDArray[np.uint64]]:
        """Return the memory of the shards that are needed, and where in it samples lie: those the core can decode."""
        shard_of, offsets, lengths = self.source.locate(indices)
        needed, place = np.unique(shard_of, return_inverse=True)
        memories = [self.source.files.memory(shard) for shard in needed.tolist()]
        is_here = np.array([memory is not None for memory in memories], dtype=np.bool_)[place]
        decodes = (self.source.kinds[indices] == KIND_RECORD) & (sizes > 0).all(axis=1) & is_here
        mapped = tuple(b"" if memory is None else memory for memory in memories)
        return mapped, place.astype(np.int32), offsets, np.where(decodes, lengths, np.uint64(0))
