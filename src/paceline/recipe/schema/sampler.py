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


class OwnSampler(PluginSection):
    """Your own sampler: `MySampler(**args)` returns a callable that takes a seed, an epoch and the number of images,
    and returns the indices of the epoch's samples ([the interface](../how-to/extend.md#custom-samplers))."""


SamplerSection = Annotated[Annotated[Shuffle | Repeated | OwnSampler, ByName()], ACCEPT_NAME, NAME_JSON_SCHEMA]
