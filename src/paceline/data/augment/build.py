"""Build the augmentation of `data.augment`, for the loader and for the device.

`data/resize` has the part that crops and resizes single images, `data/augment/mixup` the part that mixes labels.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.dataset import TargetTable
from paceline.core.pixels import PixelType
from paceline.data.augment.auto import (
    build_augmix,
    build_auto_augment,
    build_rand_augment,
    build_trivial_augment,
)
from paceline.data.augment.color import BatchColorJitter, solarize
from paceline.data.augment.erasing import BatchCutout, BatchRandomErasing, Color, to_color
from paceline.data.augment.geometric import Augment, BatchAffine, BatchFlip, BatchPadCrop, BatchVerticalFlip
from paceline.data.augment.mixup import PairMixer, build_mixer
from paceline.data.augment.pillow import (
    BatchRandomApply,
    BatchThreeAugment,
    GaussianBlur,
    build_timm_rand_augment,
    grayscale,
)
from paceline.data.augment.plugin import build_plugin_augment
from paceline.data.transfer import DeviceBatch, DeviceTransfer
from paceline.recipe.schema import augment as sections
from paceline.recipe.schema.base import Section
from paceline.recipe.schema.data import Data


def build_augments(
    sections: tuple[Section, ...], mean: tuple[float, ...], pixels: PixelType = "uint8"
) -> tuple[Augment, ...]:
    """Build the augmentations of `data.augment` in order; the fill color of `pixels` is `mean`, as in `DatasetInfo`."""
    color = to_color(mean, pixels)
    built = (_build_augment(section, position, color) for position, section in enumerate(sections))
    return tuple(augment for augment in built if augment is not None)


def split_augments(
    augments: tuple[Augment, ...], *, on_device: bool
) -> tuple[tuple[Augment, ...], tuple[Augment, ...]]:
    """Split augmentations, in order, into those of the loader and those of the device.

    The loader gets everything up to the last one that needs the host; without `on_device` it gets all.
    """
    on_host = [position for position, augment in enumerate(augments) if augment.needs_host]
    num_in_loader = (on_host[-1] + 1 if on_host else 0) if on_device else len(augments)
    return augments[:num_in_loader], augments[num_in_loader:]


def has_host_augments(data: Data) -> bool:
    """Whether the host must crop or augment training batches even if a GPU augments."""
    # Random crops are part of resizing, which runs on single images.
    crops = any(isinstance(section, sections.RandomResizedCrop) for section in data.augment)
    return crops or any(augment.needs_host for augment in build_augments(data.augment, mean=()))


def _build_augment(section: Section, position: int, color: Color) -> Augment | None:
    match section:
        case sections.OwnAugment():
            return build_plugin_augment(section, position)
        case sections.PadCrop(padding=padding, mode=mode):
            return BatchPadCrop(padding, mode)
        case sections.Flip(p=p, mode=mode):
            return BatchFlip(p, alternating=mode == "alternating")
        case sections.Rotate(degrees=degrees, interpolation=interpolation):
            return BatchAffine(degrees, 0.0, (1.0, 1.0), interpolation)
        case sections.Affine(shear_degrees=shear, scale=scale, interpolation=interpolation):
            return BatchAffine(0.0, shear, scale, interpolation)
        case sections.VerticalFlip(p=p):
            return BatchVerticalFlip(p)
    return _build_policy(section, color) or _build_color_or_erasing(section, color)


def _build_policy(section: Section, color: Color) -> Augment | None:
    """Build an augmentation that draws operations from a list; None for any other."""
    match section:
        case sections.RandAugment(num_ops=num_ops, magnitude=magnitude):
            return build_rand_augment(num_ops, magnitude)
        case sections.RandAugmentTimm() as timm:
            return build_timm_rand_augment(timm.num_ops, timm.magnitude, timm.magnitude_std, timm.p, color)
        case sections.TrivialAugment():
            return build_trivial_augment()
        case sections.AutoAugment(policy=policy):
            return build_auto_augment(policy)
        case sections.AugMix() as mix:
            depth = 0 if mix.depth == "random" else mix.depth
            return build_augmix(mix.severity, mix.width, depth, mix.alpha, all_ops=mix.all_ops)
        case sections.ThreeAugment():
            return BatchThreeAugment()
    return None


def _build_color_or_erasing(section: Section, color: Color) -> Augment | None:
    match section:
        case sections.ColorJitter() as jitter:
            return BatchColorJitter(jitter.brightness, jitter.contrast, jitter.saturation, jitter.hue, jitter.p)
        case sections.Grayscale(p=p):
            return BatchRandomApply(p, grayscale)
        case sections.Solarize(p=p, threshold=threshold):
            return BatchRandomApply(p, solarize, threshold, threshold)
        case sections.GaussianBlur(p=p, sigma=sigma):
            return BatchRandomApply(p, GaussianBlur(sigma[1]), *sigma)
        case sections.RandomErasing(p=p, scale=scale, ratio=ratio):
            return BatchRandomErasing(p, scale, ratio, color)
        case sections.Cutout(size=size):
            return BatchCutout(size, color)
        case sections.RandomResizedCrop() | sections.Resize() | sections.MixUp() | sections.CutMix():
            return None
    raise AssertionError(f"no augmentation for {section!r}")


@dataclass(frozen=True)
class DeviceTransforms:
    """Augment, normalize and mix a batch on the device, in this order.

    With `targets`, float32 [T, num_classes] on the device, labels are the numbers of its rows.
    """

    augments: tuple[Augment, ...]
    normalize: Callable[[Tensor], Tensor]
    mix: PairMixer | None
    targets: Tensor | None = None

    def __call__(self, batch: DeviceBatch) -> tuple[Tensor, Tensor]:
        """Return (float images [N, C, H, W], labels int64 [N] or targets float [N, num_classes])."""
        num_draws = sum(augment.num_draws for augment in self.augments) + (self.mix.num_draws if self.mix else 0)
        assert num_draws == batch.draws.shape[1], "the loader was built for another `on_device`"
        images, used = batch.images, 0
        for augment in self.augments:
            images = augment(images, batch.draws[:, used : used + augment.num_draws])
            used += augment.num_draws
        normalized = self.normalize(images)
        labels = batch.labels if self.targets is None else self.targets[batch.labels]
        return self.mix(normalized, labels, batch.draws[:, used:]) if self.mix else (normalized, labels)


def build_device_transforms(
    data: Data, transfer: DeviceTransfer, num_classes: int, *, on_device: bool, targets: TargetTable | None = None
) -> DeviceTransforms:
    """Build the device part of the augmentation, for a loader built with the same `data` and `on_device`."""
    _, deferred = split_augments(build_augments(data.augment, transfer.mean, transfer.pixels), on_device=on_device)
    rows = place_targets(targets, transfer.device)
    return DeviceTransforms(deferred, transfer.normalize, build_mixer(data.augment, num_classes), rows)


def place_targets(targets: TargetTable | None, device: torch.device) -> Tensor | None:
    """Return the rows of `targets`, float32 [T, num_classes], on `device`, or None without a table."""
    return None if targets is None else torch.tensor(targets.rows, device=device)
