"""The validation split as other loops take it: every image once over all ranks, finished on the device."""

from collections.abc import Iterator
from typing import Self

from torch import Tensor

from paceline.interop.dataset import Dataset
from paceline.interop.pipeline import Pipeline
from paceline.interop.shared import Shared


class EvalLoader:
    """Yield (images, labels) of this rank's share of the validation split, the same in every iteration.

    `images` are float [N, C, H, W], normalised, or uint8 where that was asked for, `labels` int64 [N], both on the
    device that was asked for. Every image is in one batch of one rank: nothing is padded and nothing dropped, so sum
    what you count over the ranks, and divide by `dataset.num_images`. Batches have up to `batch_size` images. All ranks
    have as many batches, so that loops that meet at each do not hang, but where shares differ and no size evens them
    out: with a `data.eval_batch_size` of 1, or fewer than two images on some rank.

    A bad image, where `data.on_bad_image` is skip, is a warning and left out; there may be a batch less for it.
    """

    def __init__(self, *, pipeline: Pipeline, num_batches: int, batch_size: int, shared: Shared) -> None:
        self._pipeline = pipeline
        self._num_batches = num_batches
        self._batch_size = batch_size
        self._shared: Shared | None = shared

    def __len__(self) -> int:
        """How many batches this rank has."""
        return self._num_batches

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield all of this rank's batches, in the order of the set."""
        try:
            for number in range(self._num_batches):
                batch = self._pipeline.ahead.take(number)
                self._pipeline.note_bad(batch)
                if len(batch):
                    yield self._pipeline.finished(batch)
        finally:
            self._pipeline.ahead.close()  # also where it is left early

    @property
    def batch_size(self) -> int:
        """The most images of a batch, on this rank."""
        return self._batch_size

    @property
    def dataset(self) -> Dataset:
        """Facts of the split: `classes`, `num_images`, ..."""
        return self._pipeline.facts

    def close(self) -> None:
        """End whoever makes batches ahead, and let go of what is shared with the other split's loader."""
        self._pipeline.close()
        self._shared = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def even_batch(num_images: int, batch_size: int, world_size: int) -> int:
    """Return the most images of a batch, up to `batch_size`, with which all ranks have as many batches.

    Shares differ by an image at most: a rank has `num_images // world_size` or one more. Where no size will do, as for
    one image on some ranks and none on others, it is `batch_size`.
    """
    fewest, rest = divmod(num_images, world_size)
    if rest:
        for size in range(batch_size, 0, -1):
            if -(-fewest // size) == -(-(fewest + 1) // size):
                return size
    return batch_size
