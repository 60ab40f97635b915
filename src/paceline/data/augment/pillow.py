"""timm's and DeiT's augmentation, with operations as Pillow computes them.

Images are uint8 [N, C, H, W], with one amount per image, float64 [N]. The results equal Pillow's to the bit, whose
rounding differs from torchvision's functions on tensors.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from paceline.data.augment.color import (
    GroupOperation,
    apply_operations,
    equalize,
    identity,
    posterize,
    smooth_inside,
    solarize,
)
from paceline.data.augment.erasing import Color, fill_mask

_BLUR_PASSES = 3
_BLUR_RADII = (0.1, 2.0)
_FIXED_POINT = 1 << 24


def to_gray(images: Tensor) -> Tensor:
    """Return the luma of ITU-R 601-2, uint8 [N, 1, H, W], as `Image.convert("L")`."""
    if images.shape[1] == 1:
        return images
    red, green, blue = images.int().unbind(1)
    return ((red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16).to(torch.uint8)[:, None]


def grayscale(images: Tensor, amounts: Tensor) -> Tensor:
    """Replace each color by its luma."""
    return to_gray(images).expand_as(images)


def invert(images: Tensor, amounts: Tensor) -> Tensor:
    """Invert each value."""
    return ~images


def enhance_color(images: Tensor, factors: Tensor) -> Tensor:
    """Blend the images with their luma, as `ImageEnhance.Color`."""
    return _blend(to_gray(images), images, factors)


def enhance_contrast(images: Tensor, factors: Tensor) -> Tensor:
    """Blend the images with their mean luma, as `ImageEnhance.Contrast`."""
    gray = to_gray(images)
    mean = gray.sum(dim=(1, 2, 3)).double() / gray[0].numel()
    return _blend((mean + 0.5).floor()[:, None, None, None], images, factors)


def enhance_brightness(images: Tensor, factors: Tensor) -> Tensor:
    """Blend the images with black, as `ImageEnhance.Brightness`."""
    return _blend(torch.zeros_like(images[:1]), images, factors)


def enhance_sharpness(images: Tensor, factors: Tensor) -> Tensor:
    """Blend the images with a smoothed copy, as `ImageEnhance.Sharpness`."""
    smooth = images.float()
    if min(images.shape[-2:]) > 2:
        smooth[..., 1:-1, 1:-1] = smooth_inside(smooth)
    return _blend(smooth, images, factors)


def _blend(others: Tensor, images: Tensor, factors: Tensor) -> Tensor:
    """Return other + factor * (image - other), as `Image.blend` rounds it."""
    base = others.float()
    # A product and a sum: `lerp` and `addcmul` may round only once.
    change = (images.float() - base) * factors.float()[:, None, None, None]
    return (base + change).clamp_(0, 255).to(torch.uint8)


def autocontrast(images: Tensor, amounts: Tensor) -> Tensor:
    """Stretch each channel to 0..255, as `ImageOps.autocontrast`."""
    low, high = (end(images, dim=(2, 3), keepdim=True).double() for end in (torch.amin, torch.amax))
    # Not `255 / range`, which torch computes as a product with the reciprocal.
    scale = torch.full_like(high, 255).div_((high - low).clamp_(min=1))
    stretched = (images * scale - low * scale).clamp_(0, 255).to(torch.uint8)
    return torch.where(high > low, stretched, images)


def solarize_add(images: Tensor, amounts: Tensor) -> Tensor:
    """Add `amounts` to each value below 128."""
    added = (images.int() + amounts.int()[:, None, None, None]).clamp_(max=255).to(torch.uint8)
    return torch.where(images < 128, added, images)


@dataclass(frozen=True)
class Movement:
    """Move pixels bilinearly, as `Image.transform`; pixels from outside are `fill`.

    `invert` maps amounts, height and width to the entries (a, b, c, d, e, f), float64 [N] or numbers: pixel (x, y) is
    sampled at (a x + b y + c, d x + e y + f), measured from the upper left corner of the image.
    """

    invert: Callable[[Tensor, int, int], tuple[Tensor | float, ...]]
    fill: Color

    def __call__(self, images: Tensor, amounts: Tensor) -> Tensor:
        """Return uint8 [N, C, H, W]."""
        height, width = images.shape[-2:]
        entries = (torch.as_tensor(each).to(amounts).expand_as(amounts) for each in self.invert(amounts, height, width))
        a, b, c, d, e, f = (entry[:, None, None] for entry in entries)
        x = torch.arange(width, dtype=torch.float64, device=images.device)[None, None, :] + 0.5
        y = torch.arange(height, dtype=torch.float64, device=images.device)[None, :, None] + 0.5
        source_x, source_y = a * x + b * y + c, d * x + e * y + f
        is_outside = (source_x < 0) | (source_x >= width) | (source_y < 0) | (source_y >= height)
        return fill_mask(_sample(images, source_x - 0.5, source_y - 0.5), is_outside[:, None], self.fill)


def _sample(images: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return `images` at positions `x` and `y`, float64 [N, H, W], between pixels bilinearly, then truncated."""
    # Not `grid_sample`: another order of operations would round other pixels to the next whole number.
    height, width = images.shape[-2:]
    left, top = x.floor(), y.floor()
    columns = [each.clamp(0, width - 1).long() for each in (left, left + 1)]
    rows = [each.clamp(0, height - 1).long() * width for each in (top, top + 1)]
    right_share, lower_share = (x - left)[:, None], (y - top)[:, None]
    sides = []
    for row in rows:
        first, second = (
            images.flatten(2).gather(2, (row + column).flatten(1)[:, None].expand(-1, images.shape[1], -1))
            for column in columns
        )
        first, second = first.view(images.shape).double(), second.view(images.shape).double()
        sides.append(first + (second - first) * right_share)
    return (sides[0] + (sides[1] - sides[0]) * lower_share).to(torch.uint8)


def invert_shear_x(slopes: Tensor, height: int, width: int) -> tuple[Tensor | float, ...]:
    """Return the inverse that shifts each row by its slope times its distance from the upper edge."""
    return 1.0, slopes, 0.0, 0.0, 1.0, 0.0


def invert_shear_y(slopes: Tensor, height: int, width: int) -> tuple[Tensor | float, ...]:
    """Return the inverse that shifts each column by its slope times its distance from the left edge."""
    return 1.0, 0.0, 0.0, slopes, 1.0, 0.0


def invert_translate_x(shares: Tensor, height: int, width: int) -> tuple[Tensor | float, ...]:
    """Return the inverse that shifts left by shares of the width."""
    return 1.0, 0.0, shares * width, 0.0, 1.0, 0.0


def invert_translate_y(shares: Tensor, height: int, width: int) -> tuple[Tensor | float, ...]:
    """Return the inverse that shifts up by shares of the height."""
    return 1.0, 0.0, 0.0, 0.0, 1.0, shares * height


def invert_rotate(degrees: Tensor, height: int, width: int) -> tuple[Tensor | float, ...]:
    """Return the inverse that rotates counter-clockwise about the center."""
    angles = torch.deg2rad(degrees.remainder(360))
    cos, sin = torch.cos(angles).round(decimals=15), torch.sin(angles).round(decimals=15)
    x, y = width / 2, height / 2
    return cos, -sin, (sin * y - cos * x) + x, sin, cos, (-sin * x - cos * y) + y


@dataclass(frozen=True)
class GaussianBlur:
    """Blur with a standard deviation of up to `largest` pixels per image, as `ImageFilter.GaussianBlur`.

    Pillow's blur is three box blurs of each row, then of each column, in fixed point (Gwosdek et al. 2011, Theoretical
    Foundations of Gaussian Convolution by Extended Box Filtering). Pixels beyond the edge equal those at the edge.
    """

    largest: float

    def __call__(self, images: Tensor, radii: Tensor) -> Tensor:
        """Return uint8 [N, C, H, W]; `radii` are the standard deviations."""
        reach = int(_box_radii(torch.tensor(self.largest))) + 1
        boxes = _box_radii(radii)[:, None]
        # The weight of whole pixels, and what is left for the two at the ends: integers, so that sums are exact.
        inner = (_FIXED_POINT / (boxes * 2 + 1)).trunc().double()
        ends = ((_FIXED_POINT - (2 * boxes.trunc().double() + 1) * inner) / 2).floor()
        distances = torch.arange(-reach, reach + 1, device=images.device).abs()
        weights = torch.where(distances <= boxes.trunc(), inner, torch.where(distances > boxes + 1, 0.0, ends))
        blurred = images.double()
        for axis in (3, 3, 3, 2, 2, 2):
            padding = (reach, reach, 0, 0) if axis == 3 else (0, 0, reach, reach)
            padded, size = functional.pad(blurred, padding, mode="replicate"), images.shape[axis]
            taps = [
                padded.narrow(axis, start, size) * weights[:, start, None, None, None] for start in range(2 * reach + 1)
            ]
            blurred = ((torch.stack(taps).sum(dim=0) + _FIXED_POINT // 2) / _FIXED_POINT).floor()
        return blurred.to(torch.uint8)


def _box_radii(radii: Tensor) -> Tensor:
    """Return the radius of a box blur that makes a Gaussian blur of each radius when repeated, float32."""
    # In float32 and float64 as in Pillow's `BoxBlur.c`.
    radii = radii.float()
    variance = radii * radii / _BLUR_PASSES
    length = (12 * variance.double() + 1).sqrt().float().double()
    whole = ((length - 1) / 2).floor()
    rest = ((2 * whole + 1) * (whole * (whole + 1) - 3 * variance.double())).float()
    beyond = 6 * (variance - ((whole + 1) * (whole + 1)).float()).double()
    return whole.float() + (rest.double() / beyond).float()


@dataclass(frozen=True)
class BatchRandomApply:
    """Apply `operation` with probability `p`, with an amount from `lowest` to `highest`. Draws: whether, amount."""

    p: float
    operation: GroupOperation
    lowest: float = 0.0
    highest: float = 0.0
    num_draws: int = 2
    alternating: bool = False
    needs_host: bool = True

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        """Return uint8 [N, C, H, W]."""
        amounts = self.lowest + draws[:, 1:] * (self.highest - self.lowest)
        return apply_operations(images, (draws[:, :1] < self.p).long(), amounts, [identity, self.operation])


@dataclass(frozen=True)
class BatchThreeAugment:
    """Make each image gray, solarize it from 128 on, or blur it by 0.1 to 2 pixels. Draws: which, radius.

    3-Augment of DeiT III (Touvron et al. 2022, arXiv 2204.07118, section 3), without its color jitter.
    """

    num_draws: int = 2
    alternating: bool = False
    needs_host: bool = True

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        """Return uint8 [N, C, H, W]."""
        chosen = (draws[:, :1] * 3).long()
        amounts = torch.where(chosen == 1, 128.0, _BLUR_RADII[0] + draws[:, 1:] * (_BLUR_RADII[1] - _BLUR_RADII[0]))
        return apply_operations(images, chosen, amounts, [grayscale, solarize, GaussianBlur(_BLUR_RADII[1])])


@dataclass(frozen=True)
class LeveledOperation:
    """An operation of timm's, and its amounts float64 [...] for levels in [0, 1] and signs -1 or 1."""

    apply: GroupOperation
    amounts: Callable[[Tensor, Tensor], Tensor] = lambda levels, signs: levels


@dataclass(frozen=True)
class TimmRandAugment:
    """Apply `num_ops` operations in sequence with probability `p` each, at levels from a normal distribution.

    As timm's `rand-mM-mstdS-inc1` with `deviation` S, and `magnitude` M out of 10. Draws per operation: its number,
    whether to apply it, the level, and the sign.
    """

    operations: tuple[LeveledOperation, ...]
    num_ops: int
    magnitude: float
    deviation: float
    p: float
    alternating: bool = False
    needs_host: bool = True

    @property
    def num_draws(self) -> int:
        """Draws per sample."""
        return 4 * self.num_ops

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        """Return uint8 [N, C, H, W]."""
        operation_draw, apply_draw, level_draw, sign_draw = draws.view(-1, self.num_ops, 4).unbind(2)
        chosen = (operation_draw * len(self.operations)).long()
        # Draws are multiples of 2^-32, and 0 has no finite quantile.
        noise = self.deviation * torch.special.ndtri(level_draw.clamp(min=2.0**-33))
        levels = (self.magnitude + noise).clamp_(0, 10) / 10
        signs = torch.where(sign_draw < 0.5, -1.0, 1.0)
        amounts = torch.stack([operation.amounts(levels, signs) for operation in self.operations])
        amounts = amounts.gather(0, chosen[None])[0]
        chosen = chosen.masked_fill(apply_draw >= self.p, len(self.operations))
        applied = [*(operation.apply for operation in self.operations), identity]
        return apply_operations(images, chosen, amounts, applied)


def build_timm_rand_augment(num_ops: int, magnitude: float, deviation: float, p: float, fill: Color) -> TimmRandAugment:
    """Build timm's RandAugment with its list of 15 operations that get stronger with the level (`inc1`).

    Pixels from outside have the color `fill`, and movements are bilinear.
    """

    def signed(largest: float) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda levels, signs: levels * largest * signs

    def factor(levels: Tensor, signs: Tensor) -> Tensor:
        return (1 + levels * 0.9 * signs).clamp(min=0.1)

    operations = (
        LeveledOperation(autocontrast),
        LeveledOperation(equalize),
        LeveledOperation(invert),
        LeveledOperation(Movement(invert_rotate, fill), signed(30.0)),
        LeveledOperation(posterize, lambda levels, signs: 4 - (levels * 4).trunc()),
        LeveledOperation(solarize, lambda levels, signs: 256 - (levels * 256).trunc()),
        LeveledOperation(solarize_add, lambda levels, signs: (levels * 110).trunc()),
        LeveledOperation(enhance_color, factor),
        LeveledOperation(enhance_contrast, factor),
        LeveledOperation(enhance_brightness, factor),
        LeveledOperation(enhance_sharpness, factor),
        LeveledOperation(Movement(invert_shear_x, fill), signed(0.3)),
        LeveledOperation(Movement(invert_shear_y, fill), signed(0.3)),
        LeveledOperation(Movement(invert_translate_x, fill), signed(0.45)),
        LeveledOperation(Movement(invert_translate_y, fill), signed(0.45)),
    )
    return TimmRandAugment(operations, num_ops, magnitude, deviation, p)
