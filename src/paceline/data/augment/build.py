"""Build the batch-wise augmentation that `data.augment` describes."""

from paceline.data.augment.auto import build_rand_augment, build_trivial_augment
from paceline.data.augment.colour import BatchColorJitter
from paceline.data.augment.erase import BatchCutout, BatchRandomErasing, to_8_bit_color
from paceline.data.augment.geometry import BatchAffine, BatchFlip, BatchPadCrop
from paceline.data.augment.own import build_plugin_augment
from paceline.data.augment.protocol import Augment
from paceline.recipe.schema import augment as sections
from paceline.recipe.schema.data import Data
from paceline.recipe.schema.section import Section


# `data.sizing` builds the entries that resize single images, `data.mix` those that mix labels.
def build_augments(sections: tuple[Section, ...], mean: tuple[float, ...]) -> tuple[Augment, ...]:
    """Build the augmentations of `data.augment` in order; `mean`, of pixels in [0, 1], is the fill color."""
    built = (
        _build_geometric(section) or _build_plugin(section, at) or _build_color_or_erasing(section, mean)
        for at, section in enumerate(sections)
    )
    return tuple(augment for augment in built if augment is not None)


def split_augments(
    augments: tuple[Augment, ...], *, on_device: bool
) -> tuple[tuple[Augment, ...], tuple[Augment, ...]]:
    """Split augmentations into those of the loader and those of the device, keeping their order.

    The loader gets everything up to the last one that needs the host; without `on_device` it gets all.
    """
    needing = [position for position, augment in enumerate(augments) if augment.needs_host]
    first = (needing[-1] + 1 if needing else 0) if on_device else len(augments)
    return augments[:first], augments[first:]


def has_host_augments(data: Data) -> bool:
    """Whether the host must augment training batches even if a GPU augments: per-image crops, or augmentations that
    need the host.
    """
    crops = any(isinstance(section, sections.RandomResizedCrop) for section in data.augment)
    return crops or any(augment.needs_host for augment in build_augments(data.augment, mean=()))


def _build_plugin(section: Section, position: int) -> Augment | None:
    return build_plugin_augment(section, position) if isinstance(section, sections.OwnAugment) else None


def _build_geometric(section: Section) -> Augment | None:
    match section:
        case sections.PadCrop(padding=padding, mode=mode):
            return BatchPadCrop(padding, mode)
        case sections.Flip(p=p, mode=mode):
            return BatchFlip(p, alternating=mode == "alternating")
        case sections.Rotate(degrees=degrees, interpolation=interpolation):
            return BatchAffine(degrees, 0.0, (1.0, 1.0), interpolation)
        case sections.Affine(shear_degrees=shear, scale=scale, interpolation=interpolation):
            return BatchAffine(0.0, shear, scale, interpolation)
    return None


def _build_color_or_erasing(section: Section, mean: tuple[float, ...]) -> Augment | None:
    match section:
        case sections.ColorJitter() as jitter:
            return BatchColorJitter(jitter.brightness, jitter.contrast, jitter.saturation, jitter.hue)
        case sections.RandAugment(num_ops=num_ops, magnitude=magnitude):
            return build_rand_augment(num_ops, magnitude)
        case sections.TrivialAugment():
            return build_trivial_augment()
        case sections.RandomErasing(p=p, scale=scale, ratio=ratio):
            return BatchRandomErasing(p, scale, ratio, to_8_bit_color(mean))
        case sections.Cutout(size=size):
            return BatchCutout(size, to_8_bit_color(mean))
        case sections.RandomResizedCrop() | sections.Resize() | sections.MixUp() | sections.CutMix():
            return None
    raise AssertionError(f"no object for {section!r}")
