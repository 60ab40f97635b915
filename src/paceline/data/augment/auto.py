"""RandAugment and TrivialAugment: operations drawn from a list of 14, at magnitudes from a table of 31.

Same as torchvision's `RandAugment` (Cubuk et al. 2020, arXiv 1909.13719) and `TrivialAugmentWide` (Müller and Hutter
2021, arXiv 2103.10158); pixels from outside the image are black.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.data.augment import color
from paceline.data.augment.color import GroupOperation, apply_operations
from paceline.data.augment.geometric import warp

NUM_MAGNITUDES = 31


@dataclass(frozen=True)
class AutoAugmentOperation:
    """An operation, and its float64 [31] magnitudes for a height and width in pixels."""

    name: str
    apply: GroupOperation
    magnitudes: Callable[[int, int], Tensor]
    is_signed: bool = False


@dataclass(frozen=True)
class AutoAugment:
    """Apply `num_ops` operations in sequence, drawn independently with replacement.

    Draws per operation: its number, its magnitude from `lowest` to `highest`, and the sign.
    """

    operations: tuple[AutoAugmentOperation, ...]
    num_ops: int
    lowest: int
    highest: int
    alternating: bool = False
    needs_host: bool = True

    @property
    def num_draws(self) -> int:
        """Draws per sample."""
        return 3 * self.num_ops

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        """Return uint8 [N, C, H, W]."""
        height, width = images.shape[-2:]
        operation_draw, magnitude_draw, sign_draw = draws.view(-1, self.num_ops, 3).unbind(2)
        chosen = (operation_draw * len(self.operations)).long()
        table = torch.stack([operation.magnitudes(height, width) for operation in self.operations])
        amounts = table[chosen, self.lowest + (magnitude_draw * (self.highest - self.lowest + 1)).long()]
        is_signed = torch.tensor([operation.is_signed for operation in self.operations])
        amounts = torch.where(is_signed[chosen] & (sign_draw < 0.5), -amounts, amounts)
        return apply_operations(images, chosen, amounts, [operation.apply for operation in self.operations])


def build_rand_augment(num_ops: int, magnitude: int) -> AutoAugment:
    """Build RandAugment: `num_ops` operations at one magnitude, 0 to 30."""
    space = _build_operations(shear=0.3, width_share=150 / 331, degrees=30.0, strength=0.9, lost_bits=4)
    return AutoAugment(space, num_ops, magnitude, magnitude)


def build_trivial_augment() -> AutoAugment:
    """Build TrivialAugment with its wide space: one operation at any magnitude."""
    space = _build_operations(shear=0.99, pixels=32.0, degrees=135.0, strength=0.99, lost_bits=6)
    return AutoAugment(space, 1, 0, NUM_MAGNITUDES - 1)


def _build_operations(
    *, shear: float, degrees: float, strength: float, lost_bits: int, width_share: float = 0.0, pixels: float = 0.0
) -> tuple[AutoAugmentOperation, ...]:

    # The arguments are the largest magnitudes, and the order is torchvision's.
    def rising(largest: float) -> Callable[[int, int], Tensor]:
        return lambda height, width: _linspace(0.0, largest)

    none, enhance = rising(0.0), rising(strength)
    return (
        AutoAugmentOperation("identity", color.identity, none),
        AutoAugmentOperation("shear_x", shear_x, rising(shear), is_signed=True),
        AutoAugmentOperation("shear_y", shear_y, rising(shear), is_signed=True),
        AutoAugmentOperation(
            "translate_x", translate_x, lambda height, width: _linspace(0.0, pixels + width_share * width), True
        ),
        AutoAugmentOperation(
            "translate_y", translate_y, lambda height, width: _linspace(0.0, pixels + width_share * height), True
        ),
        AutoAugmentOperation("rotate", rotate, rising(degrees), is_signed=True),
        AutoAugmentOperation("brightness", _relative_to_one(color.adjust_brightness), enhance, is_signed=True),
        AutoAugmentOperation("color", _relative_to_one(color.adjust_saturation), enhance, is_signed=True),
        AutoAugmentOperation("contrast", _relative_to_one(color.adjust_contrast), enhance, is_signed=True),
        AutoAugmentOperation("sharpness", _relative_to_one(color.adjust_sharpness), enhance, is_signed=True),
        AutoAugmentOperation("posterize", color.posterize, lambda height, width: _posterize_bits(lost_bits)),
        AutoAugmentOperation("solarize", color.solarize, lambda height, width: _linspace(1.0, 0.0) * 255),
        AutoAugmentOperation("autocontrast", color.autocontrast, none),
        AutoAugmentOperation("equalize", color.equalize, none),
    )


def _linspace(first: float, last: float) -> Tensor:
    # Through float32, as in torchvision: rounding to whole pixels depends on the last bit.
    return torch.linspace(first, last, NUM_MAGNITUDES).double()


def _posterize_bits(lost: int) -> Tensor:
    return (8 - torch.arange(NUM_MAGNITUDES) / ((NUM_MAGNITUDES - 1) / lost)).round().double()


def _relative_to_one(adjust: GroupOperation) -> GroupOperation:
    # Magnitude 0 leaves images unchanged, and so does factor 1.
    return lambda images, amounts: adjust(images, 1 + amounts)


def shear_x(images: Tensor, slopes: Tensor) -> Tensor:
    """Shift each row horizontally by its slope times its distance from the upper edge."""
    return _warp_affine(images, right_by_y=slopes, right=slopes * images.shape[2] / 2)


def shear_y(images: Tensor, slopes: Tensor) -> Tensor:
    """Shift each column vertically by its slope times its distance from the left edge."""
    return _warp_affine(images, down_by_x=slopes, down=slopes * images.shape[3] / 2)


def translate_x(images: Tensor, pixels: Tensor) -> Tensor:
    """Shift right by whole pixels."""
    return _warp_affine(images, right=-pixels.trunc())


def translate_y(images: Tensor, pixels: Tensor) -> Tensor:
    """Shift down by whole pixels."""
    return _warp_affine(images, down=-pixels.trunc())


def rotate(images: Tensor, degrees: Tensor) -> Tensor:
    """Rotate counter-clockwise about the center."""
    cos, sin = torch.cos(torch.deg2rad(degrees)), torch.sin(torch.deg2rad(degrees))
    zero = torch.zeros_like(cos)
    return warp(images, torch.stack([cos, -sin, zero, sin, cos, zero], dim=1).view(-1, 2, 3), "nearest")


def _warp_affine(
    images: Tensor,
    *,
    right_by_y: Tensor | float = 0.0,
    right: Tensor | float = 0.0,
    down_by_x: Tensor | float = 0.0,
    down: Tensor | float = 0.0,
) -> Tensor:
    """Sample images at (x + right_by_y * y + right, y + down_by_x * x + down), in pixels."""
    inverse = torch.eye(2, 3, dtype=torch.float64, device=images.device).repeat(len(images), 1, 1)
    inverse[:, 0, 1], inverse[:, 0, 2] = right_by_y, right
    inverse[:, 1, 0], inverse[:, 1, 2] = down_by_x, down
    return warp(images, inverse, "nearest")
