"""Plan batches for the native extension: where their images lie, and which boxes it decodes.

`NativeImages` says how images of a kind of source are found, measured and submitted: those of packs here, JPEG files in
`native_files`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.dataset import Source
from paceline.data.augment.geometric import BatchFlip
from paceline.data.order import BatchSchedule
from paceline.data.pack.format import KIND_RECORD
from paceline.data.pack.reader import PackSource
from paceline.data.resize import Resizer

if TYPE_CHECKING:
    from paceline.data._native import Pool

# Images that are planned together: measured, more are not cheaper, and the wait for the plan grows.
_IMAGES_PER_PLAN: Final = 2048


class DecodeTask(Protocol):
    """A submitted batch, as `_native.Task`."""

    @property
    def seconds(self) -> float:
        """Seconds spent so far, summed over threads."""
        ...

    @property
    def done(self) -> bool:
        """Whether all images are done. Raise ValueError if the pool was closed before."""
        ...

    def wait(self, timeout_s: float, /) -> bool:
        """Wait up to `timeout_s` seconds, and return `done`."""
        ...


class LocatedImages(Protocol):
    """N images that the extension can find."""

    @property
    def sizes(self) -> NDArray[np.integer]:
        """Upright (height, width), [N, 2], 0 if unknown."""
        ...

    @property
    def is_decodable(self) -> NDArray[np.bool_]:
        """Whether the extension is to decode an image, bool [N]."""
        ...

    @property
    def may_need_python(self) -> bool:
        """Whether Python threads are to finish a batch of these images."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes of the images, as far as they are known."""
        ...

    def take(self, rows: slice) -> Self:
        """Return some of the images."""
        ...

    def submit(
        self, pool: "Pool", plan: "BatchPlan", resizer: Resizer, images: Tensor, status: NDArray[np.int32]
    ) -> DecodeTask:
        """Decode the batch `plan` of these images into `images`, uint8 [N, C, size, size], and `status`, int32 [N]."""
        ...


class NativeImages(Protocol):
    """The images of a source, as the extension finds and decodes them."""

    @property
    def source(self) -> Source:
        """The source."""
        ...

    def start(self, pool: "Pool") -> None:
        """Begin an iteration, which decodes in `pool`."""
        ...

    def measure(self, indices: NDArray[np.int64]) -> None:
        """Begin to find out the sizes of images, int64 [N], that will be located next."""
        ...

    def locate(self, indices: NDArray[np.int64]) -> LocatedImages:
        """Return where images are, int64 [N]."""
        ...

    def finish(self) -> None:
        """End an iteration."""
        ...


class BatchPlan(NamedTuple):
    """A batch, and the crops of its N images."""

    number: int
    size: int
    indices: NDArray[np.int64]
    draws: NDArray[np.float64]  # all of the batch
    located: LocatedImages
    boxes: NDArray[np.float64]
    flips: NDArray[np.bool_]
    is_inside: bool


@dataclass(frozen=True)
class BatchPlanner:
    """Plan batches of `schedule` from `images`, resized as by `resizer` and flipped by `flip`."""

    images: NativeImages
    schedule: BatchSchedule
    resizer: Resizer
    flip: BatchFlip | None

    @property
    def source(self) -> Source:
        """The source of the images."""
        return self.images.source

    @property
    def num_draws(self) -> int:
        """Draws per sample."""
        return self.resizer.num_draws + (self.flip is not None)

    def batches(self, first: int, stop: int) -> Iterator[BatchPlan]:
        """Yield the plans of batches `first` to `stop` - 1, planned several at a time."""
        while first < stop:
            numbers = self._find_same_size(first, stop)
            plans = self._plan_batches(numbers)
            first = numbers.stop
            if first < stop:  # while this plan is decoded, the sizes for the next one are read
                following = self._find_same_size(first, stop)
                self.images.measure(np.concatenate([self.schedule.indices(number) for number in following]))
            yield from plans

    # Planning runs in the main thread, between steps. For few images the fixed cost of numpy calls dominates, hence
    # several batches at once, up to a change of the image size.
    def _find_same_size(self, first: int, stop: int) -> range:
        num_batches = max(1, _IMAGES_PER_PLAN // max(1, len(self.schedule.indices(first))))
        size = self.schedule.size(first)
        numbers = range(first, min(first + num_batches, stop))
        return numbers[: len(list(takewhile(lambda number: self.schedule.size(number) == size, numbers)))]

    def _plan_batches(self, numbers: range) -> list[BatchPlan]:
        size = self.schedule.size(numbers[0])
        batches = [self.schedule.indices(number) for number in numbers]
        indices, draws = np.concatenate(batches), np.concatenate([self.schedule.draws(number) for number in numbers])
        located = self.images.locate(indices)
        # An unknown size is 0, and such an image is not decoded by the extension: any valid box will do.
        sizes = np.maximum(located.sizes, 1).astype(np.int64)
        regions = self.resizer.compute_regions(sizes, draws[:, : self.resizer.num_draws], size)
        flips = np.zeros(len(indices), dtype=np.bool_)
        if self.flip is not None:
            flips = draws[:, self.resizer.num_draws] < self.flip.p
        ends = np.cumsum([len(batch) for batch in batches]).tolist()
        plans = []
        for number, start, end in zip(numbers, [0, *ends], ends, strict=False):
            rows = slice(start, end)
            crop = (regions.boxes[rows], flips[rows], regions.is_inside)
            plans.append(BatchPlan(number, size, indices[rows], draws[rows], located.take(rows), *crop))
        return plans


@dataclass(frozen=True)
class PackImages:
    """The records of a pack."""

    source: PackSource

    def start(self, pool: "Pool") -> None:
        """Do nothing."""

    def measure(self, indices: NDArray[np.int64]) -> None:
        """Do nothing: a pack has the sizes."""

    def finish(self) -> None:
        """Do nothing."""

    def locate(self, indices: NDArray[np.int64]) -> "LocatedRecords":
        """Return the records of images, int64 [N], in mapped shards."""
        source = self.source
        sizes = np.stack([source.heights[indices], source.widths[indices]], axis=1)
        shard_of, offsets, lengths = source.locate(indices)
        shards, position = np.unique(shard_of, return_inverse=True)
        buffers = [source.files.memory(shard) for shard in shards.tolist()]
        is_local = np.array([buffer is not None for buffer in buffers], dtype=np.bool_)[position]
        is_decodable = (source.kinds[indices] == KIND_RECORD) & (sizes > 0).all(axis=1) & is_local
        mapped = tuple(b"" if buffer is None else buffer for buffer in buffers)
        lengths = np.where(is_decodable, lengths, np.uint64(0))
        return LocatedRecords(sizes, mapped, position.astype(np.int32), offsets, lengths)


class LocatedRecords(NamedTuple):
    """Records in mapped shards; a length is 0 for an image that the extension must not decode."""

    sizes: NDArray[np.uint16]
    shard_buffers: tuple[memoryview | bytes, ...]
    shard_numbers: NDArray[np.int32]  # indices into `shard_buffers`
    offsets: NDArray[np.uint64]
    lengths: NDArray[np.uint64]

    @property
    def is_decodable(self) -> NDArray[np.bool_]:
        """Whether the extension is to decode an image, bool [N]."""
        return self.lengths > 0

    @property
    def may_need_python(self) -> bool:
        """Whether an image is not to be decoded by the extension."""
        return bool((self.lengths == 0).any())

    @property
    def num_bytes(self) -> int:
        """Bytes of the records."""
        return int(self.lengths.sum())

    def take(self, rows: slice) -> "LocatedRecords":
        """Return some of the records."""
        return LocatedRecords(
            self.sizes[rows], self.shard_buffers, self.shard_numbers[rows], self.offsets[rows], self.lengths[rows]
        )

    def submit(
        self, pool: "Pool", plan: BatchPlan, resizer: Resizer, images: Tensor, status: NDArray[np.int32]
    ) -> DecodeTask:
        """Decode the records of a batch."""
        return pool.submit(
            *self[1:],
            plan.boxes,
            plan.flips,
            plan.is_inside,
            plan.size,
            images.shape[1],
            images.numpy(),
            status,
        )
