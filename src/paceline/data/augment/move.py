"""Crop and flip with the native extension, which moves each pixel only once."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.data.augment.geometry import BatchFlip, BatchPadCrop
from paceline.data.augment.protocol import Augment, Change
from paceline.data.native import MAX_SIDE, NativeExtension


@dataclass(frozen=True)
class FusedCropFlip:
    """Apply `crop`, then `flip` to images in host memory, bit-identically; one of them may be None.

    Draws: those of `crop`, then that of `flip`.
    """

    native: NativeExtension
    crop: BatchPadCrop | None
    flip: BatchFlip | None

    @property
    def num_draws(self) -> int:
        """Number of draws per sample."""
        return 2 * (self.crop is not None) + (self.flip is not None)

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        """Return uint8 [N, C, H, W]."""
        if not self.supports(images.shape[-2], images.shape[-1]):
            return self._apply_separately(images, draws)
        pixels = images.contiguous().numpy()
        return self.gather(pixels, np.arange(len(pixels)), draws.numpy())

    def gather(self, images: NDArray[np.uint8], indices: NDArray[np.int64], draws: NDArray[np.float64]) -> Tensor:
        """Return uint8 [N, C, H, W]: `images` [M, C, H, W] at `indices` [N], changed by draws [N, num_draws]."""
        channels, height, width = images.shape[1:]
        padding = self.crop.padding if self.crop else 0
        offsets = self._compute_offsets(draws)
        flips = draws[:, -1] < self.flip.p if self.flip else np.zeros(len(indices), dtype=np.bool_)
        out = torch.empty(len(indices), channels, height, width, dtype=torch.uint8)
        tops, lefts = offsets[0], offsets[1]
        self.native.move(
            images, indices, tops, lefts, flips, padding, self._is_reflecting, (channels, height, width), out.numpy()
        )
        return out

    def supports(self, height: int, width: int) -> bool:
        """Whether the extension supports images of this size in pixels; torch raises if padding cannot be reflected."""
        padding = self.crop.padding if self.crop else 0
        return max(height, width) <= MAX_SIDE and padding < min(height, width)

    def _apply_separately(self, images: Tensor, draws: Tensor) -> Tensor:
        used = 0
        for augment in (self.crop, self.flip):
            if augment is not None:
                images = augment(images, draws[:, used : used + augment.num_draws])
                used += augment.num_draws
        return images

    def _compute_offsets(self, draws: NDArray[np.float64]) -> NDArray[np.int32]:
        """Return int32 [2, N]: row and column of each crop in the padded image."""
        if self.crop is None:
            return np.zeros((2, len(draws)), dtype=np.int32)
        return (draws[:, :2].T * (2 * self.crop.padding + 1)).astype(np.int32, order="C")

    @property
    def _is_reflecting(self) -> bool:
        return self.crop is not None and self.crop.mode == "reflect"


def fuse_crop_flip(augments: Sequence[Augment], native: NativeExtension | None) -> tuple[Change, ...]:
    """Combine crops and flips of images in host memory into one native pass each, if the extension is available."""
    if native is None:
        return tuple(augments)
    changes: list[Change] = []
    for augment in augments:
        match augment, changes[-1] if changes else None:
            case BatchFlip() as flip, FusedCropFlip(crop=BatchPadCrop() as crop, flip=None):
                changes[-1] = FusedCropFlip(native, crop, flip)
            case BatchFlip() as flip, _:
                changes.append(FusedCropFlip(native, None, flip))
            case BatchPadCrop() as crop, _:
                changes.append(FusedCropFlip(native, crop, None))
            case _:
                changes.append(augment)
    return tuple(changes)
