"""Divide a dataset into the folds of a cross-validation: stratified by class, by groups, repeatedly. Torch-free."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from paceline.core.dataset import DatasetInfo, Datasets, Source
from paceline.core.errors import DataError
from paceline.core.random import Stream, uniform
from paceline.core.units import count, join_few
from paceline.data.files import printable
from paceline.data.sources.build import build_datasets
from paceline.data.sources.columns import read_column, read_split_columns
from paceline.data.sources.fingerprint import get_labels
from paceline.data.sources.image_files import has_imagenet_statistics
from paceline.data.sources.subset import join_samples, select_samples
from paceline.recipe.schema.data import Data
from paceline.recipe.schema.source import SourceSection
from paceline.recipe.schema.split import Split


@dataclass(frozen=True)
class Folds:
    """The `images` that are divided, and the fold of each, int64 [N] from 0 to `num_folds` - 1."""

    images: Source
    numbers: NDArray[np.int64]
    num_folds: int


def build_run_datasets(data: Data, *, may_download: bool, skip_bad: bool = False) -> Datasets:
    """Build the two splits that a run of `data` trains and validates on.

    Raise as `build_datasets` and `select_fold`.
    """
    return select_fold(build_datasets(data.source, may_download=may_download, skip_bad=skip_bad), data)


def select_fold(datasets: Datasets, data: Data) -> Datasets:
    """Return the images to train on and to validate on of the fold that `data.split` names; `off` changes nothing.

    Classes are those of the whole dataset. Mean and standard deviation that come from the images are left out, so that
    a run measures them on its training images. Raise `DataError` as `divide_images`, and for a fold that there is not.
    """
    split = data.split
    if split == "off":
        return datasets
    folds = divide_images(datasets, split, data.source)
    if split.fold >= folds.num_folds:
        groups = count(folds.num_folds, "group")
        raise DataError(
            f"data.split.fold: {split.fold} is not one of {groups} (set data.split.fold=0 to {folds.num_folds - 1})"
        )
    is_val = folds.numbers == split.fold
    info = folds.images.info
    if not has_imagenet_statistics(info):
        info = replace(info, mean=(), std=())
    notes = (*info.notes, *_build_notes(datasets, split, folds, is_val))
    return Datasets(
        select_samples(folds.images, np.flatnonzero(~is_val), replace(info, notes=notes)),
        select_samples(folds.images, np.flatnonzero(is_val), replace(info, split="val", notes=())),
    )


def divide_images(datasets: Datasets, split: Split, section: SourceSection) -> Folds:
    """Return the folds of the images that `split` names; `section` is that of the datasets.

    Raise `DataError` for fewer images or groups than folds, and if classes or groups are unknown.
    """
    parts = [datasets.train]
    if split.pool == "all" and len(datasets.val):
        parts.append(datasets.val)
    images = parts[0] if len(parts) == 1 else join_samples(*parts)
    groups = None if split.groups == "off" else _read_groups(split, section, images, parts)
    numbers = assign_folds(split, len(images), _read_classes(images, split), groups)
    return Folds(images, numbers, int(numbers.max()) + 1)


def assign_folds(
    split: Split, num_images: int, classes: NDArray[np.integer] | None, groups: Sequence[str] | None = None
) -> NDArray[np.int64]:
    """Return the fold of each image, int64 [N], from its class, integers [N], and its group.

    Without `classes` the folds are not stratified. The result depends on nothing else than these and the seed and
    repeat of `split`. Raise `DataError` for fewer images or groups than folds.
    """
    names: dict[str, int] = {}
    if groups is not None:
        names = {name: number for number, name in enumerate(sorted(set(groups)))}
    num_units, unit = (num_images, "image") if groups is None else (len(names), "group")
    num_folds = num_units if split.folds == "groups" else split.folds
    if num_units < max(2, num_folds):
        fix = "lower it" if num_units > 1 else f"name more {unit}s"
        raise DataError(f"data.split.folds: {split.folds} needs more than {count(num_units, unit)} ({fix})")
    classes = np.zeros(num_images, dtype=np.int64) if classes is None else classes
    draws = uniform(split.seed, Stream.FOLDS, split.repeat, np.arange(num_units), 1)[:, 0]
    if groups is None:
        # Classes come in a random order, too: otherwise the image of a class of one would be in the same fold of every
        # division.
        of_classes = uniform(split.seed, Stream.FOLDS, split.repeat, np.arange(classes.max() + 1), 2)[:, 1]
        places = of_classes.argsort(kind="stable").argsort()
        return _deal_images(places[classes], draws, num_folds)
    numbers = np.array([names[group] for group in groups], dtype=np.int64)
    return numbers if split.folds == "groups" else _deal_groups(classes, numbers, draws, num_folds)


def _deal_images(places: NDArray[np.int64], draws: NDArray[np.float64], num_folds: int) -> NDArray[np.int64]:
    # Class by class, like cards: folds differ by at most one image, and by at most one of each class.
    folds = np.empty(len(places), dtype=np.int64)
    folds[np.lexsort((draws, places))] = np.arange(len(places)) % num_folds
    return folds


def _deal_groups(
    classes: NDArray[np.integer], groups: NDArray[np.int64], draws: NDArray[np.float64], num_folds: int
) -> NDArray[np.int64]:
    """Return the fold of each image: each group goes where the sum of squared shares of each class stays smallest.

    scikit-learn's `StratifiedGroupKFold` follows the same idea, and compares standard deviations.
    """
    num_classes = int(classes.max()) + 1
    totals, sizes = np.bincount(classes), np.bincount(groups)
    pairs, counts = np.unique(groups * num_classes + classes, return_counts=True)
    classes_of = pairs % num_classes
    shares_of = counts / totals[classes_of]
    ends = np.searchsorted(pairs // num_classes, np.arange(len(sizes)), side="right")
    shares, num_images = np.zeros((num_folds, num_classes)), [0] * num_folds
    fold_of = np.empty(len(sizes), dtype=np.int64)
    # Large groups first, as small ones can even out what these leave; in a random order among those of similar size
    # (the same power of two), so that repeats differ.
    for group in np.lexsort((draws, -np.frexp(sizes)[1])).tolist():
        rows = slice(ends[group - 1] if group else 0, ends[group])
        own = classes_of[rows]
        # Adding the group raises the sum by twice this, and a constant. `fsum` gives the same bits on any machine.
        costs = [math.fsum(row) for row in (shares[:, own] * shares_of[rows]).tolist()]
        fold = min(range(num_folds), key=lambda each: (costs[each], num_images[each]))
        shares[fold, own] += shares_of[rows]
        num_images[fold] += int(sizes[group])
        fold_of[group] = fold
    return fold_of[groups]


def _read_groups(split: Split, section: SourceSection, images: Source, parts: Sequence[Source]) -> list[str]:
    column, field = split.groups, "data.split.groups"
    if split.groups_file != "off":
        names = read_column(section, images, column, split.groups_file, "data.split.groups_file")
    else:
        names = read_split_columns(section, parts, column, "", field)  # each list has the column
    names = [name.strip() for name in names]
    if "" in names:
        nameless = f"{images.name_of(names.index(''))} has no value in '{printable(column)}'"
        raise DataError(f"{field}: {nameless} (name its group: one of its own if it belongs to none)")
    return names


def _read_classes(images: Source, split: Split) -> NDArray[np.integer] | None:
    if split.stratified == "off" or split.folds == "groups":
        return None
    labels = get_labels(images)
    if labels is None:
        raise DataError(
            f"data.split.stratified: the classes of {images.info.name} are known only after reading its images (set "
            "data.split.stratified=off)"
        )
    return labels


def _build_notes(datasets: Datasets, split: Split, folds: Folds, is_val: NDArray[np.bool_]) -> list[str]:
    num_val = int(is_val.sum())
    note = f"data.split: fold {split.fold} of {folds.num_folds}, {len(is_val) - num_val:,} training and {num_val:,} "
    note += "validation images"
    if split.pool == "train" and len(datasets.val):
        left_out = count(len(datasets.val), "validation image")
        note += f"; {left_out} of the source are left out (data.split.pool=all would divide them too)"
    labels = get_labels(folds.images)
    return [note, *(_note_missing(folds.images.info, labels, is_val) if labels is not None else [])]


def _note_missing(info: DatasetInfo, labels: NDArray[np.integer], is_val: NDArray[np.bool_]) -> list[str]:
    in_train, in_val = info.count_classes(labels[~is_val]), info.count_classes(labels[is_val])
    missing = [info.class_names[index] for index in np.flatnonzero((in_train == 0) & (in_val > 0))]
    if not missing:
        return []
    return [f"data.split: all images of {join_few(missing)} are in this fold, so it trains on none of them"]
