"""A rank's images of one step, on their way from whoever makes them to the model."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from paceline.data.bad import BadImage


@dataclass(frozen=True)
class Batch:
    """A rank's images of one step: uint8 [N, C, H, W], labels int64 [N], sample indices int64 [N].

    `draws`, float64 [N, D], are for what is still to be done to the images on the device (`data.finish`). `bad` are
    the samples met that could not be read. In training others stand in for them, under the indices that were asked
    for; in evaluation they are left out, so N may be 0. Tensors may be on the device already; they stay as they are
    for as long as somebody holds them.
    """

    images: Tensor
    labels: Tensor
    indices: NDArray[np.int64]
    draws: Tensor
    bad: tuple[BadImage, ...] = ()

    def __len__(self) -> int:
        return len(self.labels)

    def pin_memory(self) -> "Batch":
        """Return the batch with what is in host memory page-locked; DataLoader calls this for a GPU."""
        tensors = (self.images, self.labels, self.draws)
        images, labels, draws = (each if each.is_cuda else each.pin_memory() for each in tensors)
        return Batch(images, labels, self.indices, draws, self.bad)

    def split(self, parts: int) -> list["Batch"]:
        """Return the batch as `parts` micro-batches of equal size, in order; `bad` goes with the first."""
        if parts == 1:
            return [self]
        images, labels, draws = self.images.chunk(parts), self.labels.chunk(parts), self.draws.chunk(parts)
        indices = np.split(self.indices, parts)
        bad = (self.bad, *((),) * (parts - 1))
        return [Batch(*micro) for micro in zip(images, labels, indices, draws, bad, strict=True)]
