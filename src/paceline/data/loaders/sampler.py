"""Build the sampler of a recipe from the labels or columns of the training images."""

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from paceline.core.dataset import LABEL_SHARE, DatasetInfo, Source
from paceline.core.errors import RecipeError, suggest_similar
from paceline.core.units import Duration, count
from paceline.data.hard_sampler import HardSampler
from paceline.data.sampler import (
    MAX_WEIGHT,
    MIN_WEIGHT,
    CurriculumSampler,
    DistinctWeightedSampler,
    PluginSampler,
    RepeatedSampler,
    Sampler,
    ShuffleSampler,
    SubsetSampler,
    WeightedSampler,
    choose_subset,
    find_unusable_weights,
    inverse_powers,
    rank_images,
)
from paceline.data.sources.columns import read_numbers
from paceline.data.sources.fingerprint import get_labels
from paceline.recipe.plugins import SAMPLER, PluginRef
from paceline.recipe.schema.base import Off
from paceline.recipe.schema.data import Data
from paceline.recipe.schema.sampler import Balanced, Curriculum, Hard, OwnSampler, Repeated, Subset, Weighted


def count_samples(data: Data, num_images: int) -> int:
    """Return the samples per epoch of `num_images` training images, without their labels or columns.

    Raise `RecipeError` for an invalid plugin, and for more samples than a sampler has images.
    """
    match data.sampler:
        case Weighted(num_samples=samples) if samples != "auto":
            return samples
        case Subset():
            return data.sampler.size(num_images)
        case OwnSampler():
            return _build_plugin_sampler(data.sampler).num_samples(num_images)
    return num_images


def build_sampler(data: Data, source: Source, to_steps: Callable[[Duration], int]) -> Sampler:
    """Build the sampler of `data`, whose batch is resolved, for the training images of `source`.

    `to_steps` converts durations to steps. Raise `RecipeError` for an invalid plugin, unknown classes, missing labels
    and weights that cannot be used, and `DataError` for a column that cannot be read.
    """
    section = data.sampler
    match section:
        case Repeated(repeats=repeats):
            return RepeatedSampler(repeats, data.global_batch_size)
        case Balanced(power=power):
            return WeightedSampler(balanced_weights(source.info, _labels_of(source, section.name), power))
        case Weighted():
            return _build_weighted_sampler(section, data, source)
        case Subset(seed=seed, stratified=stratified):
            labels = _labels_of(source, "subset", "set stratified=off") if stratified == "on" else None
            return SubsetSampler(choose_subset(seed, len(source), section.size(len(source)), labels))
        case Curriculum():
            values = _read_values(section.column, section.file, data, source)
            images = rank_images(values, is_descending=section.order == "descending")
            steps_per_epoch = max(1, len(source) // data.global_batch_size)
            return CurriculumSampler(images, section.begin, to_steps(section.end) / steps_per_epoch)
        case Hard():
            return HardSampler()
        case OwnSampler():
            return _build_plugin_sampler(section)
    return ShuffleSampler(is_random=data.order == "random")


def balanced_weights(info: DatasetInfo, labels: NDArray[np.integer], power: float = 1.0) -> NDArray[np.float64]:
    """Return the weight of each image, float64 [N], the inverse of its class's images to the power `power`.

    Classes are then drawn in proportion to their images to the power 1 - `power`: 0 keeps their shares, 1/2 is
    square-root sampling (Mahajan et al. 2018, arXiv 1805.00932), and 1 draws all equally often. An image with several
    labels has the weight of its rarest class (as the repeat factors of Gupta et al. 2019, arXiv 1908.03195), and one
    without any that of the most frequent class.
    """
    table = info.targets
    if table is None:
        of_classes = inverse_powers(np.bincount(labels, minlength=info.num_classes), power)
        return np.take(of_classes, labels)
    has_class = table.rows >= LABEL_SHARE
    counts = np.bincount(labels, minlength=len(has_class)) @ has_class
    of_classes = inverse_powers(counts, power)
    of_rows = np.where(has_class, of_classes, of_classes.min()).max(axis=1)
    return np.take(of_rows, labels)


def _build_weighted_sampler(section: Weighted, data: Data, source: Source) -> Sampler:
    if section.classes != "off":
        field, weights = "data.sampler.classes", _weights_by_class(section.classes, source)
    else:
        field, weights = "data.sampler.column", _read_values(section.column, section.file, data, source)
    unusable = find_unusable_weights(weights)
    if len(unusable):
        first = int(unusable[0])
        weight, name = f"{weights[first]:g}", source.name_of(first)
        limits = f"neither 0 nor from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}"
        raise RecipeError(f"{field}: the weight of {name}, {weight}, is {limits} (correct it)")
    num_drawn = int(np.count_nonzero(weights))
    if not num_drawn:
        raise RecipeError("data.sampler: weighted has a weight of 0 for every image (raise some)")
    if section.replacement:
        return WeightedSampler(weights, count_samples(data, len(source)))
    assert section.num_samples != "auto", "the schema demands a number"
    if section.num_samples > num_drawn:
        raise RecipeError(
            f"data.sampler.num_samples: {section.num_samples:,} is more than the "
            f"{count(num_drawn, 'image')} with a weight above 0 (lower it, or set replacement=true)"
        )
    return DistinctWeightedSampler(weights, section.num_samples)


def _read_values(column: str, file: str | Off, data: Data, source: Source) -> NDArray[np.float64]:
    return read_numbers(data.source, source, column, "" if file == "off" else file, "data.sampler.column")


def _weights_by_class(classes: Mapping[str, float], source: Source) -> NDArray[np.float64]:
    """Return the weight of each image's class, float64 [N]; with several labels the largest, and without one 1."""
    info, labels = source.info, _labels_of(source, "weighted", "name a column")
    unknown = next((name for name in classes if name not in info.class_names), None)
    if unknown is not None:
        hint = suggest_similar(unknown, info.class_names) or " (name classes of the dataset)"
        raise RecipeError(f"data.sampler.classes: {unknown!r} is not a class of the dataset{hint}")
    of_classes = np.array([classes.get(name, 1.0) for name in info.class_names])
    if info.targets is None:
        return np.take(of_classes, labels)
    has_class = info.targets.rows >= LABEL_SHARE
    of_rows = np.where(has_class, of_classes, 0).max(axis=1)
    return np.take(np.where(has_class.any(axis=1), of_rows, 1.0), labels)


def _labels_of(source: Source, name: str, fix: str = "set data.sampler=shuffle") -> NDArray[np.integer]:
    labels = get_labels(source)
    if labels is None:
        raise RecipeError(
            f"data.sampler: {name} needs labels before training, and {source.info.name} has them only with its images "
            f"({fix})"
        )
    return labels


def _build_plugin_sampler(section: OwnSampler) -> PluginSampler:
    plugin = PluginRef("data.sampler", section.name, section.args, SAMPLER)
    return PluginSampler(plugin.make(), plugin)
