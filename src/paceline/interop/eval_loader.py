"""Validation split for other training loops: every image exactly once over all ranks, finished on the device."""

from collections.abc import Iterator
from typing import Self

from torch import Tensor

from paceline.interop.dataset import Dataset
from paceline.interop.pipeline import SplitPipeline
from paceline.interop.shared import SharedResources


class EvalLoader:
    """Yield (images, labels) of this rank's share of the validation split, the same in every iteration.

    `images` are float [N, C, H, W], normalised, or uint8 on request, `labels` int64 [N], both on the device. Every
    image is in exactly one batch of one rank, without padding or dropping: sum your counts over the ranks and divide by
    `dataset.num_images`. Batches have up to `batch_size` images. All ranks have the same number of batches, so that
    collectives in a loop do not hang. The exceptions are shares that no batch size evens out: with a
    `data.eval_batch_size` of 1, or fewer than two images on some rank.

    With `data.on_bad_image` skip, a bad image is left out with a warning, and possibly a batch with it.
    """

    def __init__(self, *, pipeline: SplitPipeline, num_batches: int, batch_size: int, shared: SharedResources) -> None:
        self._pipeline = pipeline
        self._num_batches = num_batches
        self._batch_size = batch_size
        self._shared: SharedResources | None = shared

    def __len__(self) -> int:
        """Return the number of batches on this rank."""
        return self._num_batches

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield all batches of this rank, in the order of the split."""
        try:
            for number in range(self._num_batches):
                batch = self._pipeline.prefetcher.get(number)
                self._pipeline.warn_bad_images(batch)
                if len(batch):
                    yield self._pipeline.to_device(batch)
        finally:
            self._pipeline.prefetcher.close()  # also if the loop breaks early

    @property
    def batch_size(self) -> int:
        """Maximum number of images per batch, on this rank."""
        return self._batch_size

    @property
    def dataset(self) -> Dataset:
        """Metadata of the split: `classes`, `num_images`, ..."""
        return self._pipeline.dataset

    def close(self) -> None:
        """Stop prefetching, and release what is shared with the other split's loader."""
        self._pipeline.close()
        self._shared = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def even_batch(num_images: int, batch_size: int, world_size: int) -> int:
    """Return the largest batch size up to `batch_size` that gives all ranks the same number of batches.

    Shares differ by one image at most: `num_images // world_size` or one more. If no size works, as with one image on
    some ranks and none on others, return `batch_size`.
    """
    fewest, rest = divmod(num_images, world_size)
    if rest:
        for size in range(batch_size, 0, -1):
            if -(-fewest // size) == -(-(fewest + 1) // size):
                return size
    return batch_size
