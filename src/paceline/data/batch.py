"""The batch that a loader hands to training or evaluation."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.pixels import PixelType
from paceline.data.bad_images import BadImage


def batch_dtype(pixels: PixelType) -> torch.dtype:
    """Return the type of a batch's images: uint8, or float32 for wider `pixels`, which are divided by `FULL_SCALE`."""
    return torch.uint8 if pixels == "uint8" else torch.float32


@dataclass(frozen=True)
class Batch:
    """One rank's images of one step: uint8 or float32 [N, C, H, W], labels int64 [N], sample indices int64 [N].

    `draws`, float64 [N, D], are the random draws of the augmentation on the device. `bad` lists unreadable samples:
    training keeps the requested index of each, evaluation drops it, so N may be 0.
    """

    # The tensors may be on the device already, and must not be overwritten while the batch is referenced.
    images: Tensor
    labels: Tensor
    indices: NDArray[np.int64]
    draws: Tensor
    bad: tuple[BadImage, ...] = ()

    def __len__(self) -> int:
        return len(self.labels)

    # DataLoader calls this by name, in its pinning thread.
    def pin_memory(self) -> "Batch":
        """Return the batch with its host tensors in page-locked memory."""
        tensors = (self.images, self.labels, self.draws)
        images, labels, draws = (each if each.is_cuda else each.pin_memory() for each in tensors)
        return Batch(images, labels, self.indices, draws, self.bad)

    def split(self, num_parts: int) -> list["Batch"]:
        """Split into `num_parts` micro-batches of equal size, in order."""
        if num_parts == 1:
            return [self]
        images, labels, draws = self.images.chunk(num_parts), self.labels.chunk(num_parts), self.draws.chunk(num_parts)
        indices = np.split(self.indices, num_parts)
        bad = (self.bad, *((),) * (num_parts - 1))  # in the first part only, so that each is reported once
        return [Batch(*micro) for micro in zip(images, labels, indices, draws, bad, strict=True)]
