"""Color augmentation of uint8 images [N, C, H, W], with one amount per image, float64 [N].

The results equal torchvision's v2 functions, which take one amount for all images, and Pillow's.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as F

# From uint8 [n, C, H, W] and amounts, float64 [n], to uint8 [n, C, H, W].
GroupOperation = Callable[[Tensor, Tensor], Tensor]

# Pixel values that a CPU processes together, so that they stay in its cache: with RandAugment on one core 1.3 times as
# fast as whole groups at 224 px, no difference at 32 px (measured).
_MAX_CPU_VALUES = 1 << 19
# Which level red, green and blue have in each sixth of the color wheel: 0 highest, 1 lowest, 2 falling, 3 rising. The
# last row is the first again, for a hue of exactly 1.
_LEVEL_BY_SECTOR = ((0, 3, 1), (2, 0, 1), (1, 0, 3), (1, 2, 0), (3, 1, 0), (0, 1, 2), (0, 3, 1))


def apply_operations(images: Tensor, chosen: Tensor, amounts: Tensor, operations: Sequence[GroupOperation]) -> Tensor:
    """Return uint8 [N, C, H, W]: `operations[chosen[n, s]]` is applied to image n for s = 0, 1, ...

    `chosen`, int64 [N, S], and `amounts`, float64 [N, S], must be in host memory.
    """
    # Groups are formed on the host: a GPU would have to be waited for to know the size of each one.
    rows = chosen.argsort(dim=0, stable=True)
    positions = rows.argsort(dim=0)  # of each image when sorted for a step: the inverse of `rows`
    # Each step sorts the images as the step before left them; the last permutation restores their order.
    between = (positions[:, step - 1][rows[:, step]] for step in range(1, rows.shape[1]))
    permutations = [rows[:, 0], *between, positions[:, -1]]
    indices = torch.stack(permutations).to(images.device, non_blocking=True)
    sorted_amounts = amounts.gather(0, rows).to(images.device, non_blocking=True)
    max_rows = len(images) if images.is_cuda else max(1, _MAX_CPU_VALUES // images[0].numel())
    for step in range(rows.shape[1]):
        images = images.index_select(0, indices[step])
        groups = _split_groups(torch.bincount(chosen[:, step], minlength=len(operations)).tolist(), max_rows)
        images = torch.cat([operations[number](images[group], sorted_amounts[group, step]) for number, group in groups])
    return images.index_select(0, indices[-1])


def _split_groups(sizes: list[int], max_rows: int) -> Iterator[tuple[int, slice]]:
    """Yield (group number, slice of at most `max_rows`) for consecutive groups of `sizes`."""
    start = 0
    for number, size in enumerate(sizes):
        for first in range(start, start + size, max_rows):
            yield number, slice(first, min(first + max_rows, start + size))
        start += size


@dataclass(frozen=True)
class BatchColorJitter:
    """Adjust brightness, contrast, saturation and hue, in random order, with probability `p`.

    Draws: one per property, the order, and if `p` is below 1 whether to adjust.
    """

    brightness: float
    contrast: float
    saturation: float
    hue: float
    p: float = 1.0
    alternating: bool = False
    needs_host: bool = True

    @property
    def num_draws(self) -> int:
        """Draws per sample."""
        return 5 + (self.p < 1)

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        """Return uint8 [N, C, H, W]."""
        spread = 2 * draws[:, :4] - 1
        strengths = torch.tensor([self.brightness, self.contrast, self.saturation, self.hue], dtype=torch.float64)
        amounts = spread * strengths + torch.tensor([1.0, 1.0, 1.0, 0.0], dtype=torch.float64)
        orders = torch.tensor(_list_permutations(len(strengths)))
        order = orders[(draws[:, 4] * len(orders)).long()]
        adjustments: list[GroupOperation] = [adjust_brightness, adjust_contrast, adjust_saturation, adjust_hue]
        # Strength 0 skips the work, and the rounding of a hue shift by 0.
        used = [each if strength else identity for each, strength in zip(adjustments, strengths.tolist(), strict=True)]
        amounts = amounts.gather(1, order)
        if self.p < 1:
            order = order.masked_fill(draws[:, 5:] >= self.p, len(used))
        return apply_operations(images, order, amounts, [*used, identity])


def _list_permutations(num: int) -> list[list[int]]:
    orders = []
    for number in range(math.factorial(num)):
        remaining, items, order = number, list(range(num)), []
        while items:
            remaining, position = divmod(remaining, len(items))
            order.append(items.pop(position))
        orders.append(order)
    return orders


def identity(images: Tensor, amounts: Tensor) -> Tensor:
    """Return the images unchanged."""
    return images


def adjust_brightness(images: Tensor, factors: Tensor) -> Tensor:
    """Multiply the images by `factors`: 0 is black, 1 unchanged."""
    return _to_uint8(images.mul(_per_image(factors)))


def adjust_contrast(images: Tensor, factors: Tensor) -> Tensor:
    """Blend the images with their mean gray: 0 is flat gray, 1 unchanged."""
    gray = F.rgb_to_grayscale(images)
    # Sums of integers below 2^53 are exact, so the mean does not depend on the size of the group.
    mean = gray.sum(dim=(1, 2, 3), dtype=torch.float64).float() / gray[0].numel()
    flat = mean[:, None, None, None].expand_as(gray).contiguous()  # else `addcmul_` leaves its fast path on CPUs
    return _blend(images, flat, factors)


def adjust_saturation(images: Tensor, factors: Tensor) -> Tensor:
    """Blend the images with their grayscale: 0 is gray, 1 unchanged."""
    return images if images.shape[1] == 1 else _blend(images, F.rgb_to_grayscale(images), factors)


def adjust_hue(images: Tensor, shifts: Tensor) -> Tensor:
    """Shift the hue by `shifts` turns of the color wheel; gray stays gray."""
    if images.shape[1] == 1:
        return images
    # Bit-identical to torchvision's arithmetic for one image, which follows Pillow's `Convert.c`.
    hue, saturation, value = _to_hsv(images.float().mul_(1 / 255))
    hue.add_(shifts.float()[:, None, None])
    hue.sub_(hue.floor())  # same bits as `remainder_(1)`, much faster
    return _from_hsv(hue, saturation, value).mul_(256 - 1e-3).to(torch.uint8)  # as `F.to_dtype` scales


def _to_hsv(pixels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Convert RGB, [N, 3, H, W], to hue, saturation and value, [N, H, W] each, all in [0, 1]."""
    darkest, value = pixels.aminmax(dim=1)
    is_gray = darkest == value
    span = value - darkest
    saturation = span / value.masked_fill(is_gray, 1)
    red, green, blue = ((value[:, None] - pixels) / span.masked_fill(is_gray, 1)[:, None]).unbind(1)
    not_red = torch.where(pixels[:, 1] == value, red.add(2).sub_(blue), green.add(4).sub_(red))
    hue = torch.where(pixels[:, 0] == value, blue - green, not_red)
    return hue.mul_(1 / 6).add_(1).frac_(), saturation, value


def _from_hsv(hue: Tensor, saturation: Tensor, value: Tensor) -> Tensor:
    """Return RGB in [0, 1], [N, 3, H, W]."""
    sixths = hue * 6
    sector = sixths.floor()
    spread = (sixths - sector).mul_(saturation)
    rest = 1 - saturation
    levels = torch.stack([value, rest * value, (1 - spread).mul_(value), (spread + rest).mul_(value)], dim=1)
    at = _get_level_table(hue.device)[sector.long()].movedim(3, 1)
    return levels.clamp_(0, 1).gather(1, at)


@cache
def _get_level_table(device: torch.device) -> Tensor:
    # Cached: copying a host table to a GPU would wait for the device each time.
    return torch.tensor(_LEVEL_BY_SECTOR, device=device)


def adjust_sharpness(images: Tensor, factors: Tensor) -> Tensor:
    """Blend the images with a smoothed copy: 0 is smooth, 1 unchanged; the outermost pixels stay."""
    if min(images.shape[-2:]) <= 2:
        return images
    floats = images.float()
    inner = floats[..., 1:-1, 1:-1]
    inner.copy_(torch.addcmul(inner, smooth_inside(floats) - inner, _per_image(1 - factors)))
    return _to_uint8(floats)


def smooth_inside(floats: Tensor) -> Tensor:
    """Return the images smoothed by Pillow's filter SMOOTH, without the outermost pixels, [N, C, H - 2, W - 2]."""
    # Pillow's kernel: 5/13 for the pixel, 1/13 for each of its eight neighbors. Sums of integers are exact in any
    # order, and a thirteenth of one is never halfway between two integers. Not a convolution: cuDNN would benchmark its
    # algorithms again for each group size.
    rows = floats[..., :-2, :] + floats[..., 1:-1, :] + floats[..., 2:, :]
    around = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:]
    return around.add_(floats[..., 1:-1, 1:-1], alpha=4).div_(13).round_()


def posterize(images: Tensor, bits: Tensor) -> Tensor:
    """Keep the upper `bits` of each value."""
    return images & (256 - 2 ** (8 - bits.long())).to(torch.uint8)[:, None, None, None]


def solarize(images: Tensor, thresholds: Tensor) -> Tensor:
    """Invert the values of at least `thresholds`."""
    return torch.where(images >= _per_image(thresholds), ~images, images)


def autocontrast(images: Tensor, amounts: Tensor) -> Tensor:
    """Stretch each channel to 0..255."""
    stretched: Tensor = F.autocontrast(images)
    return stretched


def equalize(images: Tensor, amounts: Tensor) -> Tensor:
    """Equalize the histogram of each channel."""
    equalized: Tensor = F.equalize(images)
    return equalized


def _blend(images: Tensor, others: Tensor, shares: Tensor) -> Tensor:
    """Return share * image + (1 - share) * other."""
    # The order of operations in torchvision, for the same bits.
    return _to_uint8(images.mul(_per_image(shares)).addcmul_(others.float(), _per_image(1 - shares)))


def _per_image(amounts: Tensor) -> Tensor:
    return amounts.float()[:, None, None, None]


def _to_uint8(floats: Tensor) -> Tensor:
    return floats.clamp_(0, 255).to(torch.uint8)
