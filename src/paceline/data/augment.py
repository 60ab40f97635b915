"""Random changes to a batch of images of one size. What a sample becomes depends on its own draws alone.

Cropping and flipping move whole pixels for the batch at once; turning and shearing sample one grid for the batch;
colours go through torchvision's v2 functions.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from torchvision.transforms.v2 import functional as F

from paceline.recipe.schema import augment as sections
from paceline.recipe.schema.section import Section

Draws = NDArray[np.float64]


class Augment(Protocol):
    """Change uint8 images [N, C, H, W] by `num_draws` uniform draws a sample."""

    @property
    def num_draws(self) -> int:
        """How many draws a sample uses."""
        ...

    def __call__(self, images: Tensor, draws: Draws) -> Tensor:
        """Return uint8 [N, C, H, W]; `draws` is float64 [N, num_draws]."""
        ...


@dataclass(frozen=True)
class PadCrop:
    """Pad every side and cut the original size out at a random place. Draws: row, column."""

    padding: int
    mode: str
    num_draws: int = 2

    def __call__(self, images: Tensor, draws: Draws) -> Tensor:
        """Return uint8 [N, C, H, W]."""
        num, channels, height, width = images.shape
        side = [self.padding] * 4
        padded: Tensor = F.pad(images, side, padding_mode="constant" if self.mode == "zeros" else "reflect")
        offsets = torch.from_numpy((draws * (2 * self.padding + 1)).astype(np.int64))
        rows = offsets[:, 0, None] + torch.arange(height)
        columns = offsets[:, 1, None] + torch.arange(width)
        padded_width = width + 2 * self.padding
        flat = (rows[:, :, None] * padded_width + columns[:, None, :]).view(num, 1, height * width)
        cut = padded.flatten(2).gather(2, flat.expand(-1, channels, -1))
        return cut.view(num, channels, height, width)


@dataclass(frozen=True)
class Flip:
    """Mirror left to right with probability `p`. Draws: one."""

    p: float
    num_draws: int = 1

    def __call__(self, images: Tensor, draws: Draws) -> Tensor:
        """Return uint8 [N, C, H, W]."""
        chosen = torch.from_numpy(np.flatnonzero(draws[:, 0] < self.p))
        return images.index_copy(0, chosen, images.index_select(0, chosen).flip(3))


@dataclass(frozen=True)
class Turn:
    """Rotate, shear along x and zoom about the centre, sampling the whole batch through one grid.

    Draws: angle, shear, zoom; a range of no width ignores its draw. What lies outside is black.
    """

    degrees: float
    shear_degrees: float
    scale: tuple[float, float]
    interpolation: str
    num_draws: int = 3

    def __call__(self, images: Tensor, draws: Draws) -> Tensor:
        """Return uint8 [N, C, H, W]."""
        height, width = images.shape[-2:]
        grid = self._grid(torch.from_numpy(draws), height, width)
        sampled = functional.grid_sample(images.float(), grid, mode=self.interpolation, align_corners=False)
        return sampled.round_().to(torch.uint8)

    def _grid(self, draws: Tensor, height: int, width: int) -> Tensor:
        """Return where each output pixel is read from, float32 [N, H, W, 2] in [-1, 1] of the input.

        The forward map is rotation x shear x zoom in pixels from the centre; the grid holds its inverse.
        """
        angle = torch.deg2rad((2 * draws[:, 0] - 1) * self.degrees)
        shear = torch.tan(torch.deg2rad((2 * draws[:, 1] - 1) * self.shear_degrees))
        zoom = self.scale[0] + draws[:, 2] * (self.scale[1] - self.scale[0])
        cos, sin = torch.cos(angle), torch.sin(angle)
        inverse = torch.stack([cos + shear * sin, shear * cos - sin, sin, cos], dim=1) / zoom[:, None]
        x = torch.arange(width, dtype=torch.float64) - (width - 1) / 2
        y = torch.arange(height, dtype=torch.float64) - (height - 1) / 2
        a, b, c, d = (inverse[:, i, None, None] for i in range(4))
        source_x = a * x[None, None, :] + b * y[None, :, None]
        source_y = c * x[None, None, :] + d * y[None, :, None]
        return torch.stack([source_x * (2 / width), source_y * (2 / height)], dim=3).float()


@dataclass(frozen=True)
class ColorJitter:
    """Change brightness, contrast, saturation and hue, in a random order. Draws: one each, and the order."""

    brightness: float
    contrast: float
    saturation: float
    hue: float
    num_draws: int = 5

    def __call__(self, images: Tensor, draws: Draws) -> Tensor:
        """Return uint8 [N, C, H, W]."""
        return torch.stack([self._one(image, draw) for image, draw in zip(images, draws, strict=True)])

    def _one(self, image: Tensor, draw: NDArray[np.float64]) -> Tensor:
        spread = 2 * draw[:4] - 1
        changes = [
            (F.adjust_brightness, 1 + spread[0] * self.brightness, self.brightness),
            (F.adjust_contrast, 1 + spread[1] * self.contrast, self.contrast),
            (F.adjust_saturation, 1 + spread[2] * self.saturation, self.saturation),
            (F.adjust_hue, spread[3] * self.hue, self.hue),
        ]
        remaining = int(draw[4] * math.factorial(len(changes)))
        while changes:
            remaining, place = divmod(remaining, len(changes))
            change, factor, strength = changes.pop(place)
            if strength:
                image = change(image, float(factor))
        return image


def build_augments(chosen: tuple[Section, ...]) -> tuple[Augment, ...]:
    """Return the objects for `data.augment`, without the ones that size (see `data.sizing`)."""
    built = (_build(section) for section in chosen)
    return tuple(augment for augment in built if augment is not None)


def _build(section: Section) -> Augment | None:
    match section:
        case sections.PadCrop(padding=padding, mode=mode):
            return PadCrop(padding, mode)
        case sections.Flip(p=p):
            return Flip(p)
        case sections.Rotate(degrees=degrees, interpolation=interpolation):
            return Turn(degrees, 0.0, (1.0, 1.0), interpolation)
        case sections.Affine(shear_degrees=shear, scale=scale, interpolation=interpolation):
            return Turn(0.0, shear, scale, interpolation)
        case sections.ColorJitter() as jitter:
            return ColorJitter(jitter.brightness, jitter.contrast, jitter.saturation, jitter.hue)
        case sections.RandomResizedCrop() | sections.Resize():
            return None
    raise AssertionError(f"no object for {section!r}")
