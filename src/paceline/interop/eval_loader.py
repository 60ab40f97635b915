"""The validation split as other loops take it: every image once over all ranks, finished on the device."""

from collections.abc import Iterator
from typing import Self

from torch import Tensor

from paceline.data.finish import Finish
from paceline.data.loader import Loader
from paceline.data.placement import Placement
from paceline.interop.ahead import Ahead
from paceline.interop.dataset import Dataset
from paceline.interop.shared import Shared
from paceline.train.evaluate import LeftOut


class EvalLoader:
    """Yield (images, labels) of this rank's share of the validation split, the same in every iteration.

    `images` are float [N, C, H, W], normalised, or uint8 where that was asked for, `labels` int64 [N], both on the
    device that was asked for. Every image is in one batch of one rank: nothing is padded and nothing dropped, so sum
    what you count over the ranks, and divide by `dataset.num_images`. Batches have up to `batch_size` images. All ranks
    have as many batches, so that loops that meet at each do not hang, but where shares differ and no size evens them
    out: with a `data.eval_batch_size` of 1, or fewer than two images on some rank.

    A bad image, where `data.on_bad_image` is skip, is a warning and left out; there may be a batch less for it.
    """

    def __init__(
        self,
        *,
        loader: Loader,
        ahead: Ahead,
        num_batches: int,
        batch_size: int,
        place: Placement,
        finish: Finish,
        left_out: LeftOut,
        facts: Dataset,
        shared: Shared,
    ) -> None:
        self._loader = loader
        self._ahead = ahead
        self._num_batches = num_batches
        self._batch_size = batch_size
        self._place = place
        self._finish = finish
        self._left_out = left_out
        self._facts = facts
        self._shared: Shared | None = shared

    def __len__(self) -> int:
        """How many batches this rank has."""
        return self._num_batches

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield all of this rank's batches, in the order of the set."""
        try:
            for number in range(self._num_batches):
                batch = self._ahead.take(number)
                if batch.bad:
                    self._left_out.note(batch.bad)
                    self._left_out.settle()
                if len(batch):
                    yield self._finish(self._place(batch))
        finally:
            self._ahead.close()  # also where it is left early

    @property
    def batch_size(self) -> int:
        """The most images of a batch, on this rank."""
        return self._batch_size

    @property
    def dataset(self) -> Dataset:
        """Facts of the split: `classes`, `num_images`, ..."""
        return self._facts

    def close(self) -> None:
        """End whoever makes batches ahead, and let go of what is shared with the other split's loader."""
        self._ahead.close()
        self._loader.close()
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
