"""Fill a part of each image with the dataset's mean color, which is zero after normalization."""

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.pixels import PixelType

_MAX_BOX_ATTEMPTS = 10

Color = tuple[float, ...]


def to_color(mean: tuple[float, ...], pixels: PixelType) -> Color:
    """Return `mean` as the nearest 8-bit value of each channel, and for wider pixels as it is."""
    if pixels != "uint8":
        return mean
    # Cutout's authors, timm (`const`) and torchvision's `RandomErasing` write zero after normalizing instead.
    return tuple(min(255, max(0, round(255 * value))) for value in mean)


@dataclass(frozen=True)
class BatchCutout:
    """Fill a square of side `size` pixels around a random pixel, clipped at the edges. Draws: row, column.

    DeVries and Taylor 2017, arXiv 1708.04552.
    """

    size: int
    color: Color
    num_draws: int = 2
    alternating: bool = False
    needs_host: bool = False

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        """Return uint8 [N, C, H, W]."""
        height, width = images.shape[-2:]
        top = (draws[:, 0] * height).long() - self.size // 2
        left = (draws[:, 1] * width).long() - self.size // 2
        return fill_mask(images, box_mask(top, left, top + self.size, left + self.size, height, width), self.color)


@dataclass(frozen=True)
class BatchRandomErasing:
    """Fill a random rectangle with probability `p` (Zhong et al. 2020, arXiv 1708.04896).

    Same as torchvision's: ten attempts for a rectangle smaller than the image, else none. `ratio` is width / height.
    Draws: whether to erase, area and ratio of each attempt, position.
    """

    p: float
    scale: tuple[float, float]
    ratio: tuple[float, float]
    color: Color
    num_draws: int = 3 + 2 * _MAX_BOX_ATTEMPTS
    alternating: bool = False
    needs_host: bool = False

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        """Return uint8 [N, C, H, W]."""
        height, width = images.shape[-2:]
        areas = height * width * _interpolate(self.scale, draws[:, 1:-2:2])
        ratios = self.ratio[0] * (self.ratio[1] / self.ratio[0]) ** draws[:, 2:-2:2]
        heights, widths = (areas / ratios).sqrt().round().long(), (areas * ratios).sqrt().round().long()
        fits = (heights >= 1) & (widths >= 1) & (heights < height) & (widths < width)
        first = fits.byte().argmax(dim=1, keepdim=True)  # `argmax` does not take bool
        # An image that is not erased gets a box of size 0: selecting images would wait for the device.
        chosen = (draws[:, 0] < self.p) & fits.any(dim=1)
        box_height, box_width = heights.gather(1, first)[:, 0] * chosen, widths.gather(1, first)[:, 0] * chosen
        top = (draws[:, -2] * (height - box_height + 1)).long()
        left = (draws[:, -1] * (width - box_width + 1)).long()
        return fill_mask(images, box_mask(top, left, top + box_height, left + box_width, height, width), self.color)


def _interpolate(ends: tuple[float, float], draws: Tensor) -> Tensor:
    return ends[0] + draws * (ends[1] - ends[0])


def box_mask(top: Tensor, left: Tensor, bottom: Tensor, right: Tensor, height: int, width: int) -> Tensor:
    """Return bool [N, 1, height, width] masks of boxes, int64 [N] each; `bottom` and `right` are exclusive."""
    rows = torch.arange(height, device=top.device)
    columns = torch.arange(width, device=top.device)
    in_rows = (rows >= top[:, None]) & (rows < bottom[:, None])
    in_columns = (columns >= left[:, None]) & (columns < right[:, None])
    return (in_rows[:, :, None] & in_columns[:, None, :])[:, None]


def fill_mask(images: Tensor, mask: Tensor, color: Color) -> Tensor:
    """Return the images with `color` wherever `mask`, bool [N, 1, H, W], is true."""
    filled = images.clone()
    for channel, value in zip(filled.unbind(1), color, strict=True):
        channel.masked_fill_(mask[:, 0], value)
    return filled
