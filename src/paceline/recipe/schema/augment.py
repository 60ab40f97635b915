"""The recipe's section `data.augment`: one variant per augmentation, applied in the order of the list."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt, field_validator, model_validator

from paceline.core.units import Duration
from paceline.recipe.schema.base import (
    ACCEPT_NAME,
    NAME_JSON_SCHEMA,
    ByName,
    Off,
    PluginSection,
    Section,
    TrainingDuration,
)


def _check_ascending(ends: tuple[float, float]) -> tuple[float, float]:
    if ends[0] > ends[1]:
        raise ValueError(f"{list(ends)} falls (write {list(ends[::-1])})")
    return ends


Range = Annotated[tuple[PositiveFloat, PositiveFloat], AfterValidator(_check_ascending)]
Share = Annotated[float, Field(gt=0, le=1)]
Shares = Annotated[tuple[Share, Share], AfterValidator(_check_ascending)]


class AnyPixels(Section):
    """Base of augmentations that move, fill or mix pixels of any type and number of channels."""


class PadCrop(AnyPixels):
    """Pad every side, then crop the original size at a random position."""

    name: Literal["pad_crop"] = "pad_crop"
    padding: int = Field(4, ge=1)
    """Pixels added to each side."""
    mode: Literal["zeros", "reflect"] = "zeros"
    """Content of the padding."""


class Flip(AnyPixels):
    """Mirror left to right."""

    name: Literal["flip"] = "flip"
    p: float = Field(0.5, gt=0, le=1)
    """Probability."""
    mode: Literal["random", "alternating"] = "random"
    """`random` draws again each epoch. `alternating` mirrors half of the images in one epoch and the other half in
    the next, so that two epochs show every image both ways (Jordan 2024, arXiv 2404.00498, section 3.6)."""

    @model_validator(mode="after")
    def _check_p(self) -> Self:
        if self.mode == "alternating" and self.p != 0.5:
            raise ValueError("p has no effect with mode alternating, which mirrors every second time (leave it out)")
        return self


class Rotate(AnyPixels):
    """Rotate by an angle drawn uniformly from [-degrees, degrees]."""

    name: Literal["rotate"] = "rotate"
    degrees: float = Field(15.0, gt=0, le=180)
    """Largest angle."""
    interpolation: Literal["nearest", "bilinear"] = "nearest"
    """Interpolation between pixels."""


class Affine(AnyPixels):
    """Shear along x and zoom, about the center."""

    name: Literal["affine"] = "affine"
    shear_degrees: float = Field(0.0, ge=0, lt=90)
    """Largest shear angle in either direction, drawn uniformly."""
    scale: Range = (1.0, 1.0)
    """Smallest and largest zoom."""
    interpolation: Literal["nearest", "bilinear"] = "nearest"
    """Interpolation between pixels."""

    @model_validator(mode="after")
    def _check_effect(self) -> Self:
        if self.shear_degrees == 0 and self.scale == (1.0, 1.0):
            raise ValueError("affine has no effect without shear or zoom (set shear_degrees or scale)")
        return self


class ColorJitter(Section):
    """Change brightness, contrast, saturation and hue, in a random order."""

    added: ClassVar = ("p",)

    name: Literal["color_jitter"] = "color_jitter"
    brightness: float = Field(0.4, ge=0, le=1)
    """Factor drawn from [1 - b, 1 + b]."""
    contrast: float = Field(0.4, ge=0, le=1)
    """Factor drawn from [1 - c, 1 + c]."""
    saturation: float = Field(0.4, ge=0, le=1)
    """Factor drawn from [1 - s, 1 + s]."""
    hue: float = Field(0.0, ge=0, le=0.5)
    """Shift drawn from [-hue, hue], in turns of the color wheel."""
    p: float = Field(1.0, gt=0, le=1)
    """Probability."""

    @model_validator(mode="after")
    def _check_effect(self) -> Self:
        if self.brightness == self.contrast == self.saturation == self.hue == 0:
            raise ValueError("color_jitter has no effect with all strengths 0 (set one, or leave it out)")
        return self


class RandomResizedCrop(AnyPixels):
    """Crop a random area and aspect ratio, and resize it to `data.image_size`."""

    name: Literal["random_resized_crop"] = "random_resized_crop"
    scale: Shares = (0.08, 1.0)
    """Smallest and largest fraction of the image's area."""
    ratio: Range = (0.75, 4 / 3)
    """Smallest and largest width : height."""


class Resize(AnyPixels):
    """Resize the whole image to `data.image_size`, ignoring its aspect ratio."""

    name: Literal["resize"] = "resize"


class RandAugment(Section):
    """Apply `num_ops` operations, drawn from 14, at one magnitude (Cubuk et al. 2020, arXiv 1909.13719)."""

    name: Literal["rand_augment"] = "rand_augment"
    num_ops: int = Field(2, ge=1)
    """Operations per image."""
    magnitude: int = Field(9, ge=0, le=30)
    """Strength, out of 30."""


class RandAugmentTimm(Section):
    """timm's RandAugment, `rand-m9-mstd0.5-inc1`: each of `num_ops` operations, drawn from 15, is applied with
    probability `p` at a random magnitude. Pixels are Pillow's, moved bilinearly, and those from outside have the mean
    color."""

    name: Literal["rand_augment_timm"] = "rand_augment_timm"
    num_ops: int = Field(2, ge=1)
    """Operations per image (timm's n)."""
    magnitude: float = Field(9.0, ge=0, le=10)
    """Mean strength, out of 10 (timm's m)."""
    magnitude_std: float = Field(0.5, ge=0)
    """Standard deviation of the strength (timm's mstd)."""
    p: float = Field(0.5, gt=0, le=1)
    """Probability of each operation (timm's p)."""


class AutoAugment(Section):
    """Apply one of 25 pairs of operations, each of them with its own probability (Cubuk et al. 2019, arXiv
    1805.09501)."""

    name: Literal["auto_augment"] = "auto_augment"
    policy: Literal["imagenet", "cifar10", "svhn"] = "imagenet"
    """Dataset that the pairs were searched on."""


class AugMix(Section):
    """Blend each image with copies of it that chains of random operations have changed (Hendrycks et al. 2020, arXiv
    1912.02781), without the paper's consistency loss."""

    name: Literal["augmix"] = "augmix"
    severity: int = Field(3, ge=1, le=10)
    """Strength, out of 10."""
    width: int = Field(3, ge=1)
    """Chains per image."""
    depth: PositiveInt | Literal["random"] = "random"
    """Operations per chain; `random` draws 1 to 3."""
    alpha: float = Field(1.0, gt=0)
    """Weights are drawn from Dirichlet(alpha) over the chains, and from Beta(alpha, alpha) for the original."""
    all_ops: bool = True
    """Use brightness, color, contrast and sharpness too, which the paper leaves out."""


class ThreeAugment(Section):
    """Make each image gray, solarize it, or blur it, with equal probability (3-Augment of DeiT III, Touvron et al.
    2022, arXiv 2204.07118); there, color_jitter with strength 0.3 follows. Pixels are Pillow's."""

    name: Literal["three_augment"] = "three_augment"


class VerticalFlip(AnyPixels):
    """Mirror top to bottom."""

    name: Literal["vertical_flip"] = "vertical_flip"
    p: float = Field(0.5, gt=0, le=1)
    """Probability."""


class Grayscale(Section):
    """Replace each color by its luma, as Pillow does."""

    name: Literal["grayscale"] = "grayscale"
    p: float = Field(0.1, gt=0, le=1)
    """Probability."""


class Solarize(Section):
    """Invert the pixel values of at least `threshold`."""

    name: Literal["solarize"] = "solarize"
    p: float = Field(0.2, gt=0, le=1)
    """Probability."""
    threshold: int = Field(128, ge=0, le=255)
    """Smallest value to invert, out of 255."""


class GaussianBlur(Section):
    """Blur as Pillow's `GaussianBlur`, which approximates a Gaussian by three box blurs."""

    name: Literal["gaussian_blur"] = "gaussian_blur"
    p: float = Field(0.1, gt=0, le=1)
    """Probability."""
    sigma: Range = (0.1, 2.0)
    """Smallest and largest standard deviation in pixels."""


class TrivialAugment(Section):
    """Apply one operation at a random magnitude (Müller and Hutter 2021, arXiv 2103.10158): nothing to tune."""

    name: Literal["trivial_augment"] = "trivial_augment"


class RandomErasing(AnyPixels):
    """Blank a random rectangle (Zhong et al. 2020, arXiv 1708.04896)."""

    name: Literal["random_erasing"] = "random_erasing"
    p: float = Field(0.25, gt=0, le=1)
    """Probability."""
    scale: Shares = (0.02, 1 / 3)
    """Smallest and largest fraction of the image's area."""
    ratio: Range = (0.3, 10 / 3)
    """Smallest and largest width : height."""

    @model_validator(mode="after")
    def _check_shape(self) -> Self:
        longest = max(1.0, self.ratio[0], 1 / self.ratio[1])  # squared longest side of the most compact shape of area 1
        if self.scale[0] * longest >= 1:
            raise ValueError(
                "random_erasing has no effect: no rectangle of this scale and ratio fits (lower scale[0], or set ratio)"
            )
        return self


class Cutout(AnyPixels):
    """Blank a square at a random position, which may be partly outside (DeVries and Taylor 2017, arXiv 1708.04552)."""

    name: Literal["cutout"] = "cutout"
    size: int = Field(16, ge=1)
    """Height and width in pixels."""


class _Mixing(AnyPixels):
    """Fields of mixup and cutmix."""

    p: float = Field(1.0, gt=0, le=1)
    """Probability for a pair of neighbors to be mixed, if it is this section's."""
    until: TrainingDuration | Off = "off"
    """When to stop mixing, from the start of the run; later images have their own label alone. timm's
    `--mixup-off-epoch`."""

    @field_validator("until")
    @classmethod
    def _check_until(cls, until: Duration | Off) -> Duration | Off:
        if until != "off" and until.value == 0:
            raise ValueError(f"{until} mixes no image (set until=off for the whole run, or leave the section out)")
        return until


class MixUp(_Mixing):
    """Blend each image and its label with its neighbor's in the batch (Zhang et al. 2018, arXiv 1710.09412)."""

    added: ClassVar = ("p", "until")

    name: Literal["mixup"] = "mixup"
    alpha: float = Field(0.2, gt=0)
    """The fraction of each image in the blend is drawn from Beta(alpha, alpha)."""


class CutMix(_Mixing):
    """Paste a box of each image's neighbor in the batch into it, and mix the labels by area (Yun et al. 2019, arXiv
    1905.04899).

    If mixup is also listed, each pair of neighbors gets either mixup or cutmix, with equal probability.
    """

    added: ClassVar = ("p", "until")

    name: Literal["cutmix"] = "cutmix"
    alpha: float = Field(1.0, gt=0)
    """The fraction of the area is drawn from Beta(alpha, alpha)."""


class OwnAugment(PluginSection):
    """Your own augmentation: `MyAugment(**args)` returns a callable that takes uint8 images and their draws ([the
    interface](../how-to/extend.md#custom-augmentations))."""


AugmentSection = Annotated[
    Annotated[
        PadCrop
        | Flip
        | Rotate
        | Affine
        | ColorJitter
        | RandAugment
        | RandAugmentTimm
        | TrivialAugment
        | AutoAugment
        | AugMix
        | ThreeAugment
        | VerticalFlip
        | Grayscale
        | Solarize
        | GaussianBlur
        | RandomErasing
        | Cutout
        | RandomResizedCrop
        | Resize
        | MixUp
        | CutMix
        | OwnAugment,
        ByName(),
    ],
    ACCEPT_NAME,
    NAME_JSON_SCHEMA,
]
