"""Geometric augmentation: crop and flip move whole pixels, affine transforms resample the batch with one grid."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from torchvision.transforms.v2 import functional as F


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
        side = [self.padding] * 4
        padded: Tensor = F.pad(images, side, padding_mode="constant" if self.mode == "zeros" else "reflect")
        offsets = (draws * (2 * self.padding + 1)).long()
        rows = offsets[:, 0, None] + torch.arange(height, device=images.device)
        columns = offsets[:, 1, None] + torch.arange(width, device=images.device)
        padded_width = width + 2 * self.padding
        flat = (rows[:, :, None] * padded_width + columns[:, None, :]).view(num, 1, height * width)
        cut = padded.flatten(2).gather(2, flat.expand(-1, channels, -1))
        return cut.view(num, channels, height, width)


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
class BatchAffine:
    """Rotate, shear along x and zoom about the center.

    Draws: angle, shear, zoom; a range of zero width ignores its draw. Pixels from outside the image are black.
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
    """Return uint8 [N, C, H, W] whose pixel (x, y) is sampled at `inverse` @ (x, y, 1); outside is black.

    `inverse` is float64 [N, 2, 3], in pixels from the image center; `interpolation` is nearest or bilinear.
    """
    height, width = images.shape[-2:]
    x = torch.arange(width, dtype=torch.float64, device=images.device) - (width - 1) / 2
    y = torch.arange(height, dtype=torch.float64, device=images.device) - (height - 1) / 2
    a, b, right, c, d, down = (inverse[:, row, column, None, None] for row in range(2) for column in range(3))
    source_x = (a * x[None, None, :] + right) + b * y[None, :, None]
    source_y = c * x[None, None, :] + (d * y[None, :, None] + down)
    grid = torch.stack([source_x.mul_(2 / width).float(), source_y.mul_(2 / height).float()], dim=3)
    sampled = functional.grid_sample(images.float(), grid, mode=interpolation, align_corners=False)
    return sampled.round_().to(torch.uint8)
