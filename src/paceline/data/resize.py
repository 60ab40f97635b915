"""Crop and resize single images to the model's input size, with torchvision's antialiased resampling."""

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as F

from paceline.recipe.schema.augment import RandomResizedCrop as RandomResizedCropSection
from paceline.recipe.schema.augment import Resize as ResizeSection
from paceline.recipe.schema.data import Data

ImageOrTensor = Image.Image | Tensor
_MAX_CROP_ATTEMPTS = 10
_MAX_ASPECT_RATIO = 8  # long side / short side; a square center crop reads far less


class CropRegions(NamedTuple):
    """Crop box of each image: float64 `boxes` [N, 4], (top, left, height, width) in upright pixels.

    With `is_inside`, the resampling filter sees only pixels of the box, otherwise also those around it.
    """

    boxes: NDArray[np.float64]
    is_inside: bool


class Resizer(Protocol):
    """Resize a PIL image, or uint8 or float32 [C, H, W], to [C, size, size] of the same type, `size` in pixels."""

    @property
    def num_draws(self) -> int:
        """Number of uniform draws per sample."""
        ...

    @property
    def interpolation(self) -> InterpolationMode:
        """How pixels are interpolated."""
        ...

    def __call__(self, image: ImageOrTensor, draws: NDArray[np.float64], size: int) -> Tensor:
        """Return [C, size, size]; `draws` is float64 [num_draws]."""
        ...

    # For the native extension, which crops and resizes in one pass.
    def compute_regions(self, sizes: NDArray[np.int64], draws: NDArray[np.float64], size: int) -> CropRegions:
        """Return the regions that `__call__` crops from images of `sizes`, int64 [N, 2], with draws [N, num_draws]."""
        ...


@dataclass(frozen=True)
class StretchResizer:
    """Resize the whole image, ignoring its aspect ratio."""

    num_draws: int = 0
    interpolation: InterpolationMode = InterpolationMode.BILINEAR

    def __call__(self, image: ImageOrTensor, draws: NDArray[np.float64], size: int) -> Tensor:
        """Return [C, size, size]."""
        return to_tensor(F.resize(image, [size, size], self.interpolation, antialias=True))

    def compute_regions(self, sizes: NDArray[np.int64], draws: NDArray[np.float64], size: int) -> CropRegions:
        """Return the whole of each image."""
        return CropRegions(np.concatenate([np.zeros(sizes.shape), sizes], axis=1), is_inside=True)


@dataclass(frozen=True)
class CenterCropResizer:
    """Scale the short side to size / share and crop the center."""

    share: float
    num_draws: int = 0
    interpolation: InterpolationMode = InterpolationMode.BILINEAR

    def __call__(self, image: ImageOrTensor, draws: NDArray[np.float64], size: int) -> Tensor:
        """Return [C, size, size]."""
        side = round(size / self.share)
        resized = F.resize(_limit_aspect_ratio(image), [side], self.interpolation, antialias=True)
        return to_tensor(F.center_crop(resized, [size, size]))

    def compute_regions(self, sizes: NDArray[np.int64], draws: NDArray[np.float64], size: int) -> CropRegions:
        """Return the center of each image, in fractional pixels."""
        # Round every intermediate size as torchvision does (`_compute_resized_output_size`,
        # `_center_crop_compute_crop_anchor`).
        shortest = sizes.min(axis=1, keepdims=True)
        limited = np.minimum(sizes, _MAX_ASPECT_RATIO * shortest)
        scaled = (round(size / self.share) * limited / shortest).astype(np.int64)
        pixels = limited / scaled  # original pixels per scaled pixel
        corners = np.rint((sizes - limited) / 2) + np.rint((scaled - size) / 2) * pixels
        return CropRegions(np.concatenate([corners, size * pixels], axis=1), is_inside=False)


@dataclass(frozen=True)
class RandomCropResizer:
    """Crop a box of random area and aspect ratio, and resize it (Szegedy et al. 2015, arXiv 1409.4842).

    Same as torchvision's: ten attempts for a box inside the image, then the largest allowed box in the center. Draws:
    area and ratio of each attempt, then the position.
    """

    scale: tuple[float, float]
    ratio: tuple[float, float]
    num_draws: int = 2 * _MAX_CROP_ATTEMPTS + 2
    interpolation: InterpolationMode = InterpolationMode.BILINEAR

    def __call__(self, image: ImageOrTensor, draws: NDArray[np.float64], size: int) -> Tensor:
        """Return [C, size, size]."""
        height, width = F.get_size(image)
        top, left, box_height, box_width = self.choose_box(height, width, draws)
        box, mode = (top, left, box_height, box_width), self.interpolation
        return to_tensor(F.resized_crop(image, *box, [size, size], mode, antialias=True))

    def choose_box(self, height: int, width: int, draws: NDArray[np.float64]) -> tuple[int, int, int, int]:
        """Return the box that `draws` select: (top, left, height, width) in pixels."""
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        areas = height * width * (self.scale[0] + draws[0:-2:2] * (self.scale[1] - self.scale[0]))
        ratios = np.exp(low + draws[1:-2:2] * (high - low))
        widths, heights = np.rint(np.sqrt(areas * ratios)), np.rint(np.sqrt(areas / ratios))
        fits = (widths >= 1) & (heights >= 1) & (widths <= width) & (heights <= height)
        if not fits.any():
            return self._choose_center_box(height, width)
        first = int(np.argmax(fits))
        box_height, box_width = int(heights[first]), int(widths[first])
        top = int(draws[-2] * (height - box_height + 1))
        left = int(draws[-1] * (width - box_width + 1))
        return top, left, box_height, box_width

    def compute_regions(self, sizes: NDArray[np.int64], draws: NDArray[np.float64], size: int) -> CropRegions:
        """Return the `choose_box` of each image."""
        # The arithmetic of `choose_box`, operation by operation, so that the boxes are identical.
        areas = sizes[:, :1] * sizes[:, 1:] * (self.scale[0] + draws[:, 0:-2:2] * (self.scale[1] - self.scale[0]))
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        ratios = np.exp(low + draws[:, 1:-2:2] * (high - low))
        attempts = np.rint(np.sqrt(np.stack([areas / ratios, areas * ratios], axis=2)))
        fits = np.all((attempts >= 1) & (attempts <= sizes[:, None]), axis=2)
        box_sizes = attempts[np.arange(len(sizes)), fits.argmax(axis=1)]
        corners = np.floor(draws[:, -2:] * (sizes - box_sizes + 1))
        boxes = np.concatenate([corners, box_sizes], axis=1)
        for row in np.flatnonzero(~np.any(fits, axis=1)).tolist():  # only very long images, which are rare
            boxes[row] = self._choose_center_box(*sizes[row].tolist())
        return CropRegions(boxes, is_inside=True)

    def _choose_center_box(self, height: int, width: int) -> tuple[int, int, int, int]:
        box_width = min(width, max(1, round(height * self.ratio[1])))
        box_height = min(height, max(1, round(width / self.ratio[0])))
        return (height - box_height) // 2, (width - box_width) // 2, box_height, box_width


def _limit_aspect_ratio(image: ImageOrTensor) -> ImageOrTensor:
    height, width = F.get_size(image)
    longest = _MAX_ASPECT_RATIO * min(height, width)
    if max(height, width) <= longest:
        return image
    # Scaled by its short side, an image of 1 x 30,000 pixels would take 2 GB.
    middle: ImageOrTensor = F.center_crop(image, [min(height, longest), min(width, longest)])
    return middle


def to_tensor(image: ImageOrTensor) -> Tensor:
    """Return uint8 [C, H, W] of a PIL image in mode L or RGB, or the tensor unchanged."""
    return image if isinstance(image, torch.Tensor) else F.pil_to_tensor(image)


def build_train_resizer(data: Data, *, are_one_size: bool) -> Resizer:
    """Build the resizer of training images: the first entry of `data.augment`, else as in evaluation."""
    mode = InterpolationMode(data.interpolation)
    match data.augment[0] if data.augment else None:
        case RandomResizedCropSection(scale=scale, ratio=ratio):
            return RandomCropResizer(scale, ratio, interpolation=mode)
        case ResizeSection():
            return StretchResizer(interpolation=mode)
    return build_eval_resizer(data, are_one_size=are_one_size)


def build_eval_resizer(data: Data, *, are_one_size: bool) -> Resizer:
    """Build the resizer of evaluation images. Images that `are_one_size` are resized whole."""
    mode = InterpolationMode(data.interpolation)
    if data.eval_resize == "crop" and not are_one_size:
        return CenterCropResizer(data.eval_crop, interpolation=mode)
    return StretchResizer(interpolation=mode)
