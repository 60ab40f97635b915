"""Geometric augmentation, and the protocols of all augmentation.

The native extension can do `BatchPadCrop` and `BatchFlip`, which move whole pixels, in one pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from torchvision.transforms.v2 import functional as F

from paceline.data.native import MAX_SIDE, NativeExtension


class Change(Protocol):
    """A change to a batch: images [N, C, H, W], uint8 or float32, with `num_draws` uniform draws per sample."""

    @property
    def num_draws(self) -> int:
        """Number of draws per sample."""
        ...

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        """Return [N, C, H, W] of the same type; `draws` is float64 [N, num_draws], on the images' device or host."""
        ...


class Augment(Change, Protocol):
    """A change of `data.augment`."""

    @property
    def alternating(self) -> bool:
        """Whether the draws belong to the sample and alternate by epoch (`data.order.draw_uniform`)."""
        ...

    # If the draws select the operations: a GPU would have to be waited for to know them.
    @property
    def needs_host(self) -> bool:
        """Whether the draws must be in host memory, else they are on the images' device."""
        ...


@dataclass(frozen=True)
class BatchPadCrop:
    """Pad every side by `padding` pixels and crop the original size at a random position. Draws: row, column."""

    padding: int
    mode: str
    num_draws: int = 2
    alternating: bool = False
    needs_host: bool = False

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        """Return uint8 [N, C, H, W]."""
        num, channels, height, width = images.shape
        padded: Tensor = F.pad(
            images, [self.padding] * 4, padding_mode="constant" if self.mode == "zeros" else "reflect"
        )
        offsets = (draws * (2 * self.padding + 1)).long()
        rows = offsets[:, 0, None] + torch.arange(height, device=images.device)
        columns = offsets[:, 1, None] + torch.arange(width, device=images.device)
        padded_width = width + 2 * self.padding
        # Flat positions in the padded image: a single gather crops all images.
        flat = (rows[:, :, None] * padded_width + columns[:, None, :]).view(num, 1, height * width)
        cropped = padded.flatten(2).gather(2, flat.expand(-1, channels, -1))
        return cropped.view(num, channels, height, width)


@dataclass(frozen=True)
class BatchFlip:
    """Flip horizontally with probability `p`. Draws: one.

    Alternating draws at p = 1/2 flip an image in every second epoch (Jordan 2024, arXiv 2404.00498, section 3.6).
    """

    p: float
    num_draws: int = 1
    alternating: bool = False
    needs_host: bool = False

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        """Return uint8 [N, C, H, W]."""
        is_flipped = (draws[:, 0] < self.p)[:, None, None, None]
        return torch.where(is_flipped, images.flip(3), images)  # selecting rows would wait for the device


@dataclass(frozen=True)
class BatchVerticalFlip:
    """Mirror each image top to bottom with probability `p`. Draws: whether to mirror."""

    p: float
    num_draws: int = 1
    alternating: bool = False
    needs_host: bool = False

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        """Return uint8 [N, C, H, W]."""
        return torch.where((draws[:, 0] < self.p)[:, None, None, None], images.flip(2), images)


@dataclass(frozen=True)
class BatchAffine:
    """Rotate, shear along x and zoom about the center; pixels from outside the image are black.

    Draws: angle, shear, zoom.
    """

    degrees: float
    shear_degrees: float
    scale: tuple[float, float]
    interpolation: str
    num_draws: int = 3
    alternating: bool = False
    needs_host: bool = False

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        """Return uint8 [N, C, H, W]."""
        return warp(images, self._compute_inverse(draws), self.interpolation)

    def _compute_inverse(self, draws: Tensor) -> Tensor:
        """Return the inverse of rotation * shear * zoom, float64 [N, 2, 3]."""
        angle = torch.deg2rad((2 * draws[:, 0] - 1) * self.degrees)
        shear = torch.tan(torch.deg2rad((2 * draws[:, 1] - 1) * self.shear_degrees))
        zoom = self.scale[0] + draws[:, 2] * (self.scale[1] - self.scale[0])
        cos, sin = torch.cos(angle), torch.sin(angle)
        zero = torch.zeros_like(angle)
        entries = [cos + shear * sin, shear * cos - sin, zero, sin, cos, zero]
        return (torch.stack(entries, dim=1) / zoom[:, None]).view(-1, 2, 3)


def warp(images: Tensor, inverse: Tensor, interpolation: str) -> Tensor:
    """Return [N, C, H, W] of the same type whose pixel (x, y) is sampled at `inverse` @ (x, y, 1); outside is black.

    `inverse` is float64 [N, 2, 3], in pixels from the image center; `interpolation` is nearest or bilinear.
    """
    height, width = images.shape[-2:]
    x = torch.arange(width, dtype=torch.float64, device=images.device) - (width - 1) / 2
    y = torch.arange(height, dtype=torch.float64, device=images.device) - (height - 1) / 2
    a, b, shift_x, c, d, shift_y = (inverse[:, row, column, None, None] for row in range(2) for column in range(3))
    source_x = (a * x[None, None, :] + shift_x) + b * y[None, :, None]
    source_y = c * x[None, None, :] + (d * y[None, :, None] + shift_y)
    # `grid_sample` takes float32 positions in [-1, 1], measured from the center.
    grid = torch.stack([source_x.mul_(2 / width).float(), source_y.mul_(2 / height).float()], dim=3)
    sampled = functional.grid_sample(images.float(), grid, mode=interpolation, align_corners=False)
    return sampled if images.is_floating_point() else sampled.round_().to(torch.uint8)


@dataclass(frozen=True)
class FusedCropFlip:
    """Apply `crop`, then `flip` to images in host memory in one pass, bit-identically; one of them may be None."""

    native: NativeExtension
    crop: BatchPadCrop | None
    flip: BatchFlip | None

    @property
    def num_draws(self) -> int:
        """Draws per sample."""
        return 2 * (self.crop is not None) + (self.flip is not None)

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        """Return uint8 [N, C, H, W]."""
        if not self.supports(images.shape[-2], images.shape[-1]):
            return self._apply_separately(images, draws)
        pixels = images.contiguous().numpy()
        return self.gather(pixels, np.arange(len(pixels)), draws.numpy())

    def gather(self, images: NDArray[np.uint8], indices: NDArray[np.int64], draws: NDArray[np.float64]) -> Tensor:
        """Return uint8 [N, C, H, W]: `images` [M, C, H, W] at `indices` [N], augmented with draws [N, num_draws]."""
        channels, height, width = images.shape[1:]
        padding = self.crop.padding if self.crop else 0
        offsets = self._compute_offsets(draws)
        # The first two draws are the crop's, the last one is the flip's.
        flips = draws[:, -1] < self.flip.p if self.flip else np.zeros(len(indices), dtype=np.bool_)
        out = torch.empty(len(indices), channels, height, width, dtype=torch.uint8)
        tops, lefts = offsets
        self.native.move(
            images, indices, tops, lefts, flips, padding, self._is_reflecting, (channels, height, width), out.numpy()
        )
        return out

    def supports(self, height: int, width: int) -> bool:
        """Whether the extension supports images of this size in pixels."""
        padding = self.crop.padding if self.crop else 0
        # More padding cannot be reflected; torch, which then runs, raises an error.
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
    """Replace each crop, flip, or crop and flip by a native pass over host memory, if the extension is available."""
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
