"""Operations drawn from a list: AutoAugment, RandAugment, TrivialAugment and AugMix.

Same as torchvision's `AutoAugment` (Cubuk et al. 2019, arXiv 1805.09501), `RandAugment` (Cubuk et al. 2020, arXiv
1909.13719), `TrivialAugmentWide` (Müller and Hutter 2021, arXiv 2103.10158) and `AugMix` (Hendrycks et al. 2020, arXiv
1912.02781); pixels from outside the image are black. timm's RandAugment is in `pillow`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torchvision.transforms import AutoAugment as TorchvisionAutoAugment
from torchvision.transforms import AutoAugmentPolicy

from paceline.data.augment import color, pillow
from paceline.data.augment.color import GroupOperation, apply_operations
from paceline.data.augment.geometric import warp

NUM_MAGNITUDES = 31
_NUM_COARSE_MAGNITUDES = 10
_MAX_RANDOM_DEPTH = 3


@dataclass(frozen=True)
class AutoAugmentOperation:
    """An operation, and its float64 magnitudes, from weak to strong, for a height and width in pixels."""

    name: str
    apply: GroupOperation
    magnitudes: Callable[[int, int], Tensor]
    is_signed: bool = False


@dataclass(frozen=True)
class RandomOperations:
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
        operation_draw, magnitude_draw, sign_draw = draws.view(-1, self.num_ops, 3).unbind(2)
        chosen = (operation_draw * len(self.operations)).long()
        levels = self.lowest + (magnitude_draw * (self.highest - self.lowest + 1)).long()
        return _apply_at_levels(images, self.operations, chosen, levels, sign_draw)


def _apply_at_levels(
    images: Tensor, operations: tuple[AutoAugmentOperation, ...], chosen: Tensor, levels: Tensor, signs: Tensor
) -> Tensor:
    """Apply `chosen` operations at `levels`, int64 [N, S]; signed ones are negated where `signs` are below 0.5."""
    height, width = images.shape[-2:]
    amounts = torch.stack([operation.magnitudes(height, width) for operation in operations])[chosen, levels]
    is_signed = torch.tensor([operation.is_signed for operation in operations])
    amounts = torch.where(is_signed[chosen] & (signs < 0.5), -amounts, amounts)
    return apply_operations(images, chosen, amounts, [operation.apply for operation in operations])


@dataclass(frozen=True)
class PolicyAugment:
    """Apply one of the pairs of `policy`, float64 [P, 2, 3]: of each operation, its number, probability and level.

    Draws: the pair, and of each operation whether to apply it and the sign.
    """

    operations: tuple[AutoAugmentOperation, ...]
    policy: Tensor
    num_draws: int = 5
    alternating: bool = False
    needs_host: bool = True

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        """Return uint8 [N, C, H, W]."""
        numbers, probabilities, levels = self.policy[(draws[:, 0] * len(self.policy)).long()].unbind(2)
        # The first operation is the identity.
        chosen = torch.where(draws[:, 1::2] < probabilities, numbers, 0).long()
        return _apply_at_levels(images, self.operations, chosen, levels.long(), draws[:, 2::2])


@dataclass(frozen=True)
class AugMix:
    """Blend each image with `width` copies, each changed by a chain of operations.

    `depth` is the length of a chain, 0 for a random one of 1 to 3; magnitudes are below `severity`. Weights are drawn
    from Dirichlet(alpha, ..., alpha) and Beta(alpha, alpha). Draws: share of the original, weight of each chain, and of
    each chain its length, and each operation, magnitude and sign.
    """

    operations: tuple[AutoAugmentOperation, ...]
    severity: int
    width: int
    depth: int
    alpha: float
    alternating: bool = False
    needs_host: bool = True

    @property
    def num_draws(self) -> int:
        """Draws per sample."""
        return 1 + self.width * (2 + 3 * self._max_depth)

    @property
    def _max_depth(self) -> int:
        return self.depth or _MAX_RANDOM_DEPTH

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        """Return uint8 [N, C, H, W]."""
        shares = self._draw_weights(draws[:, : 1 + self.width]).float().to(images.device)
        mixed = shares[:, 0, None, None, None] * images
        for number, chain in enumerate(draws[:, 1 + self.width :].chunk(self.width, dim=1), start=1):
            operation_draw, magnitude_draw, sign_draw = chain[:, 1:].view(-1, self._max_depth, 3).unbind(2)
            # The first operation is the identity, which fills up short chains.
            chosen = 1 + (operation_draw * (len(self.operations) - 1)).long()
            lengths = self.depth or 1 + (chain[:, :1] * _MAX_RANDOM_DEPTH).long()
            chosen = chosen.masked_fill(torch.arange(self._max_depth) >= lengths, 0)
            levels = (magnitude_draw * self.severity).long()
            mixed.add_(
                shares[:, number, None, None, None]
                * _apply_at_levels(images, self.operations, chosen, levels, sign_draw)
            )
        return mixed.to(torch.uint8)

    def _draw_weights(self, draws: Tensor) -> Tensor:
        """Return the weights of the original and of each chain, float64 [N, 1 + width], with a sum of 1."""
        # A Dirichlet sample is one of Gamma variables divided by their sum. Quantiles are scipy's, as in `PairMixer`.
        from scipy.special import betaincinv, gammaincinv  # type: ignore[import-untyped]

        original = torch.from_numpy(betaincinv(self.alpha, self.alpha, draws[:, :1].numpy()))
        gammas = torch.from_numpy(gammaincinv(self.alpha, draws[:, 1:].numpy())).clamp_(min=1e-30)
        return torch.cat([original, (1 - original) * gammas / gammas.sum(dim=1, keepdim=True)], dim=1)


def build_auto_augment(policy: str) -> PolicyAugment:
    """Build AutoAugment with the policy of the dataset `policy`: imagenet, cifar10 or svhn."""
    operations = _build_operations(
        shear=0.3, width_share=150 / 331, degrees=30.0, strength=0.9, lost_bits=4, num=_NUM_COARSE_MAGNITUDES
    )
    invert = AutoAugmentOperation("invert", pillow.invert, lambda height, width: torch.zeros(_NUM_COARSE_MAGNITUDES))
    operations = (*operations, invert)
    numbers = {operation.name.replace("_", ""): number for number, operation in enumerate(operations)}
    pairs = TorchvisionAutoAugment(AutoAugmentPolicy(policy)).policies
    table = [[(numbers[name.lower()], p, level or 0) for name, p, level in pair] for pair in pairs]
    return PolicyAugment(operations, torch.tensor(table, dtype=torch.float64))


def build_augmix(severity: int, width: int, depth: int, alpha: float, *, all_ops: bool) -> AugMix:
    """Build AugMix; without `all_ops` it has no brightness, color, contrast and sharpness."""
    operations = _build_operations(
        shear=0.3,
        width_share=1 / 3,
        degrees=30.0,
        strength=0.9,
        lost_bits=4,
        num=_NUM_COARSE_MAGNITUDES,
        bits=4,
        interpolation="bilinear",
    )
    left_out = () if all_ops else ("brightness", "color", "contrast", "sharpness")
    chosen = tuple(operation for operation in operations if operation.name not in left_out)
    return AugMix(chosen, severity, width, depth, alpha)


def build_rand_augment(num_ops: int, magnitude: int) -> RandomOperations:
    """Build RandAugment: `num_ops` operations at one magnitude, 0 to 30."""
    space = _build_operations(shear=0.3, width_share=150 / 331, degrees=30.0, strength=0.9, lost_bits=4)
    return RandomOperations(space, num_ops, magnitude, magnitude)


def build_trivial_augment() -> RandomOperations:
    """Build TrivialAugment with its wide space: one operation at any magnitude."""
    space = _build_operations(shear=0.99, pixels=32.0, degrees=135.0, strength=0.99, lost_bits=6)
    return RandomOperations(space, 1, 0, NUM_MAGNITUDES - 1)


def _build_operations(
    *,
    shear: float,
    degrees: float,
    strength: float,
    lost_bits: int,
    width_share: float = 0.0,
    pixels: float = 0.0,
    num: int = NUM_MAGNITUDES,
    bits: int = 8,
    interpolation: str = "nearest",
) -> tuple[AutoAugmentOperation, ...]:
    """Build torchvision's operations in its order, with `num` magnitudes each; the arguments are the largest ones."""

    def linspace(first: float, last: float) -> Tensor:
        # Through float32, as in torchvision: rounding to whole pixels depends on the last bit.
        return torch.linspace(first, last, num).double()

    def rising(largest: float) -> Callable[[int, int], Tensor]:
        return lambda height, width: linspace(0.0, largest)

    def posterize_bits(height: int, width: int) -> Tensor:
        return (bits - torch.arange(num) / ((num - 1) / lost_bits)).round().double()

    def moving(move: Callable[..., Tensor]) -> GroupOperation:
        return partial(move, interpolation=interpolation)

    none, enhance = rising(0.0), rising(strength)
    return (
        AutoAugmentOperation("identity", color.identity, none),
        AutoAugmentOperation("shear_x", moving(shear_x), rising(shear), is_signed=True),
        AutoAugmentOperation("shear_y", moving(shear_y), rising(shear), is_signed=True),
        AutoAugmentOperation(
            "translate_x", moving(translate_x), lambda height, width: linspace(0.0, pixels + width_share * width), True
        ),
        AutoAugmentOperation(
            "translate_y", moving(translate_y), lambda height, width: linspace(0.0, pixels + width_share * height), True
        ),
        AutoAugmentOperation("rotate", moving(rotate), rising(degrees), is_signed=True),
        AutoAugmentOperation("brightness", _relative_to_one(color.adjust_brightness), enhance, is_signed=True),
        AutoAugmentOperation("color", _relative_to_one(color.adjust_saturation), enhance, is_signed=True),
        AutoAugmentOperation("contrast", _relative_to_one(color.adjust_contrast), enhance, is_signed=True),
        AutoAugmentOperation("sharpness", _relative_to_one(color.adjust_sharpness), enhance, is_signed=True),
        AutoAugmentOperation("posterize", color.posterize, posterize_bits),
        AutoAugmentOperation("solarize", color.solarize, lambda height, width: linspace(1.0, 0.0) * 255),
        AutoAugmentOperation("autocontrast", color.autocontrast, none),
        AutoAugmentOperation("equalize", color.equalize, none),
    )


def _relative_to_one(adjust: GroupOperation) -> GroupOperation:
    # Magnitude 0 leaves images unchanged, and so does factor 1.
    return lambda images, amounts: adjust(images, 1 + amounts)


def shear_x(images: Tensor, slopes: Tensor, interpolation: str = "nearest") -> Tensor:
    """Shift each row horizontally by its slope times its distance from the upper edge."""
    return _warp_affine(images, interpolation, right_by_y=slopes, right=slopes * images.shape[2] / 2)


def shear_y(images: Tensor, slopes: Tensor, interpolation: str = "nearest") -> Tensor:
    """Shift each column vertically by its slope times its distance from the left edge."""
    return _warp_affine(images, interpolation, down_by_x=slopes, down=slopes * images.shape[3] / 2)


def translate_x(images: Tensor, pixels: Tensor, interpolation: str = "nearest") -> Tensor:
    """Shift right by whole pixels."""
    return _warp_affine(images, interpolation, right=-pixels.trunc())


def translate_y(images: Tensor, pixels: Tensor, interpolation: str = "nearest") -> Tensor:
    """Shift down by whole pixels."""
    return _warp_affine(images, interpolation, down=-pixels.trunc())


def rotate(images: Tensor, degrees: Tensor, interpolation: str = "nearest") -> Tensor:
    """Rotate counter-clockwise about the center."""
    cos, sin = torch.cos(torch.deg2rad(degrees)), torch.sin(torch.deg2rad(degrees))
    zero = torch.zeros_like(cos)
    return warp(images, torch.stack([cos, -sin, zero, sin, cos, zero], dim=1).view(-1, 2, 3), interpolation)


def _warp_affine(
    images: Tensor,
    interpolation: str,
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
    return warp(images, inverse, interpolation)
