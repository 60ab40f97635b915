"""The recipe's section `data.sampler`: which training images an epoch visits, and in which order."""

from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveInt, model_validator

from paceline.core.errors import RecipeError
from paceline.recipe.schema.base import (
    ACCEPT_NAME,
    NAME_JSON_SCHEMA,
    Auto,
    ByName,
    Off,
    PluginSection,
    Section,
    Switch,
    TrainingDuration,
)


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


class Balanced(Section):
    """Draw every class equally often, with replacement: rare classes are repeated, and frequent ones are not seen
    whole. An image with several labels counts for its rarest class. An epoch has as many samples as images."""

    name: Literal["balanced"] = "balanced"
    power: float = Field(1.0, ge=0, le=1)
    """How far to balance: with n images, a class is drawn in proportion to n to the power 1 - `power`. 1 draws classes
    equally often, 0.5 is square-root sampling (Mahajan et al. 2018, arXiv 1805.00932), and 0 keeps their shares."""


class Weighted(Section):
    """Draw images by weights of your own, per class (`classes`) or per image (`column`). Weights are relative, and an
    image of weight 0 is never drawn."""

    name: Literal["weighted"] = "weighted"
    classes: dict[str, NonNegativeFloat] | Off = "off"
    """Weight of each image of a class, by the class's name, such as `{dog: 3}`; 1 for all other classes. With several
    labels the largest counts."""
    column: str | Off = "off"
    """Column with the weight of each image: of `file`, or else of the manifest's training list or the Hugging Face
    dataset."""
    file: str | Off = "off"
    """CSV file with `column`, and one line per training image: named in a column `path` or `image`, or else in the
    order of the images."""
    replacement: bool = True
    """Draw each sample from all images. `false` draws `num_samples` different images per epoch."""
    num_samples: PositiveInt | Auto = "auto"
    """Samples per epoch; `auto` is the number of images."""

    @model_validator(mode="after")
    def _check_weights(self) -> Self:
        if (self.classes == "off") == (self.column == "off"):
            raise ValueError("weighted needs weights from one place (set either classes or column)")
        if self.classes == {}:
            raise ValueError("classes names no class (write {CLASS: WEIGHT})")
        if self.file != "off" and self.column == "off":
            raise ValueError("file has no effect without column (set column, or file=off)")
        if not self.replacement and self.num_samples == "auto":
            raise ValueError("replacement false needs the number of images per epoch (set num_samples)")
        return self


class Subset(Section):
    """Train on a fixed random part of the images, the same for every seed of the recipe, and shuffle it in every
    epoch."""

    name: Literal["subset"] = "subset"
    fraction: Annotated[float, Field(gt=0, le=1)] | Off = "off"
    """Share of the training images."""
    num_images: PositiveInt | Off = "off"
    """Number of training images, in place of `fraction`."""
    stratified: Switch = "on"
    """Choose the same share of every class, but for rounding."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of the choice, apart from the recipe's seed."""

    def size(self, num_images: int) -> int:
        """Return the size of the subset of `num_images` images. Raise `RecipeError` if they are fewer."""
        if self.num_images == "off":
            assert self.fraction != "off", "the schema lets exactly one through"
            return max(1, round(self.fraction * num_images))
        if self.num_images > num_images:
            more = f"{self.num_images:,} is more than the {num_images:,} training images"
            raise RecipeError(f"data.sampler.num_images: {more} (lower it)")
        return self.num_images

    @model_validator(mode="after")
    def _check_size(self) -> Self:
        if (self.fraction == "off") == (self.num_images == "off"):
            raise ValueError("subset needs a size (set either fraction or num_images)")
        return self


class Curriculum(Section):
    """Begin with the easiest images, and add harder ones epoch by epoch (Bengio et al. 2009). An epoch keeps its number
    of samples: while there are fewer images, each is repeated, augmented differently."""

    name: Literal["curriculum"] = "curriculum"
    column: str
    """Column with the difficulty of each image, a number: of `file`, or else of the manifest's training list or the
    Hugging Face dataset."""
    file: str | Off = "off"
    """CSV file with `column`, and one line per training image: named in a column `path` or `image`, or else in the
    order of the images."""
    order: Literal["ascending", "descending"] = "ascending"
    """Whether the easiest image has the smallest or the largest number. Equal numbers are in a random, fixed order."""
    begin: float = Field(0.3, gt=0, le=1)
    """Share of the images in the first epoch."""
    end: TrainingDuration = "50%"
    """When all images are in use, from the start of the run; the share rises linearly until then."""


class Hard(Section):
    """Hard-example mining: draw training images more often the higher their loss was when last measured, as Loshchilov
    and Hutter 2016 (arXiv 1511.06343) and Katharopoulos and Fleuret 2018 (arXiv 1803.00942), but without weighting the
    loss to undo it. An epoch has as many samples as before. Images with wrong labels have high losses too, so it hurts
    where labels are noisy."""

    name: Literal["hard"] = "hard"
    after: int = Field(5, ge=1)
    """Epochs that visit every image once, before the first measurement."""
    every: int = Field(1, ge=1)
    """Epochs between measurements, each of which evaluates all training images without augmentation."""
    power: float = Field(1.0, gt=0, le=4)
    """Exponent of the loss, of which the weight of an image is made: more than 1 prefers the hardest images more."""
    limit: float = Field(10.0, gt=1, le=1000)
    """Largest weight relative to the mean weight; higher ones, such as those of wrong labels, are lowered to it. The
    samples that this frees give every image the same chance."""
    share: float = Field(0.5, gt=0, le=1)
    """Share of the samples that are drawn by weight; the others give every image the same chance. So an epoch has an
    image about `share` * `limit` + 1 times at most."""

    def steps(self, steps_per_epoch: int, total_steps: int) -> range:
        """Return the numbers of finished steps at which the images are measured."""
        return range(self.after * steps_per_epoch, total_steps, self.every * steps_per_epoch)


class OwnSampler(PluginSection):
    """Your own sampler: `MySampler(**args)` returns a callable that takes a seed, an epoch and the number of images,
    and returns the indices of the epoch's samples ([the interface](../how-to/extend.md#custom-samplers))."""


SamplerSection = Annotated[
    Annotated[Shuffle | Repeated | Balanced | Weighted | Subset | Curriculum | Hard | OwnSampler, ByName()],
    ACCEPT_NAME,
    NAME_JSON_SCHEMA,
]
