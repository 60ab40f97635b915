"""The recipe's section `data.sampler`: which training images an epoch visits, and in which order."""

from typing import Annotated, Literal

from pydantic import Field

from paceline.recipe.schema.base import ACCEPT_NAME, NAME_JSON_SCHEMA, ByName, PluginSection, Section


class Shuffle(Section):
    """Visit every image once per epoch, in a new random order."""

    name: Literal["shuffle"] = "shuffle"


class Repeated(Section):
    """Repeated augmentation (Hoffer et al. 2020, arXiv 1901.09335), as timm's `RepeatAugSampler`: a batch has each of
    its images several times, augmented differently. An epoch has as many samples as before, and so 1 / `repeats` of the
    images."""

    name: Literal["repeated"] = "repeated"
    repeats: int = Field(3, ge=2)
    """Augmented versions of each image in a batch."""


class Hard(Section):
    """Hard-example mining: draw training images more often the higher their loss was when last measured, as Loshchilov
    and Hutter 2016 (arXiv 1511.06343) and Katharopoulos and Fleuret 2018 (arXiv 1803.00942), but without weighting the
    loss to undo it. An epoch has as many samples as before. Images with wrong labels have high losses too, so it hurts
    where labels are noisy."""

    name: Literal["hard"] = "hard"
    warmup: int = Field(5, ge=1)
    """Epochs that visit every image once, before the first measurement."""
    every: int = Field(1, ge=1)
    """Epochs between measurements, each of which evaluates all training images without augmentation."""
    power: float = Field(1.0, gt=0, le=4)
    """Exponent of the loss, of which the weight of an image is made: more than 1 prefers the hardest images more."""
    limit: float = Field(10.0, gt=1, le=1000)
    """Largest weight relative to the mean weight; higher ones, such as those of wrong labels, are lowered to it."""
    share: float = Field(0.5, gt=0, le=1)
    """Share of the samples that are drawn by weight; the others give every image the same chance."""


class OwnSampler(PluginSection):
    """Your own sampler: `MySampler(**args)` returns a callable that takes a seed, an epoch and the number of images,
    and returns the indices of the epoch's samples ([the interface](../how-to/extend.md#custom-samplers))."""


SamplerSection = Annotated[Annotated[Shuffle | Repeated | Hard | OwnSampler, ByName()], ACCEPT_NAME, NAME_JSON_SCHEMA]
