"""Another data set than a run's own, to judge its weights by: with the run's classes, and what it normalises by.

Classes are matched by name: the set may lack some, and have them in another order. It is told from the run's own, which
may have been moved, by its digest; of that only what was held out is judged, as in training.
"""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from paceline.core.dataset import ArraySource, DatasetInfo, Datasets, Sample, Source
from paceline.core.errors import DataError, near_miss
from paceline.core.units import count
from paceline.data.decode import decode
from paceline.data.identity import dataset_digest
from paceline.data.sources.build import build_datasets
from paceline.data.sources.folder import folder_roots
from paceline.data.sources.test_folder import is_trained_on, load_test_folder
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.source import Folder, SourceSection
from paceline.train.facts import Facts

_NUM_NAMED = 10


@dataclass(frozen=True)
class Relabelled:
    """A source whose label n is label `numbers[n]` of another class list, that of `info`."""

    info: DatasetInfo
    source: Source
    numbers: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.source)

    def read(self, index: int) -> Sample:
        """Return (encoded bytes or uint8 pixels [H, W, C], label). Raise `DataError` as the source does."""
        content, label = self.source.read(index)
        return content, self.numbers[label]

    def name_of(self, index: int) -> str:
        """Return what a user would call the sample."""
        return self.source.name_of(index)


@dataclass(frozen=True)
class Decoded:
    """A source whose image files are given as pixels, so that torch sizes them as it does pixels, and not Pillow."""

    source: Source

    @property
    def info(self) -> DatasetInfo:
        """The facts of the source."""
        return self.source.info

    def __len__(self) -> int:
        return len(self.source)

    def read(self, index: int) -> Sample:
        """Return (uint8 pixels [H, W, C], label). Raise `DataError` as the source does, and for what is no image."""
        content, label = self.source.read(index)
        if isinstance(content, bytes):
            channels: Literal[1, 3] = 3 if self.info.channels == 3 else 1
            pixels = np.asarray(decode(content, channels=channels, name=self.name_of(index)))
            content = pixels if pixels.ndim == 3 else pixels[..., None]
        return content, label

    def name_of(self, index: int) -> str:
        """Return what a user would call the sample."""
        return self.source.name_of(index)


@dataclass(frozen=True)
class Judged:
    """What is judged, by which recipe, and a sentence for the user; nothing where it is the run's own set.

    Of another set both splits of `datasets` are what is judged; that of training has the facts of the run's.
    """

    recipe: Recipe
    datasets: Datasets
    note: str = ""


def read_test_set(recipe: Recipe, own: Recipe, facts: Facts, digest: str, *, is_first: bool) -> Judged:
    """Return what `recipe.data.source` names, to judge a run by that `own` trained on a set of `facts` and `digest`.

    It is read where it lies, as each image is read once. Raise `DataError` for a set that cannot be read, has a class
    that the run does not know, or has other channels, and for the run's own folder where it is split otherwise, as
    images that it was trained on would be among those that are judged.
    """
    section = _asked_for(recipe.data.source, own.data.source)
    skip_bad = recipe.data.on_bad_image == "skip"
    try:
        datasets = build_datasets(section, may_download=is_first, skip_bad=skip_bad)
        if dataset_digest(datasets) == digest:
            return Judged(recipe, datasets)
        test = datasets.val
    except DataError:
        if not isinstance(section, Folder):  # a folder need not have what can be trained on
            raise
    if isinstance(section, Folder):
        test = load_test_folder(section, skip_bad=skip_bad)
    _check_channels(test.info, facts.info)
    if facts.is_pixels and not isinstance(test, ArraySource):
        test = Decoded(test)
    warning = _warning(section, own.data.source)
    return Judged(_judging(recipe, own, facts, test), _as_of_run(test, facts.info), _note(test, facts.info, warning))


def matched(names: Sequence[str], known: Sequence[str]) -> tuple[int, ...]:
    """Return the number in `known` of each class of `names`, accents compared as they look.

    Raise `DataError` naming a class that is not known.
    """
    numbers = {unicodedata.normalize("NFC", name): number for number, name in enumerate(known)}
    for name in names:
        if unicodedata.normalize("NFC", name) not in numbers:
            some = ", ".join(known[:_NUM_NAMED]) + (", ..." if len(known) > _NUM_NAMED else "")
            raise DataError(
                f"data.source: class '{name}' is none of the {len(known):,} that the run was trained on"
                f"{near_miss(name, known)}; rename it or leave it out (they are {some})"
            )
    return tuple(numbers[unicodedata.normalize("NFC", name)] for name in names)


def _asked_for(section: SourceSection, own: SourceSection) -> SourceSection:
    """Return `section` without the folders that a run was trained from, where it names another root."""
    if not (isinstance(section, Folder) and isinstance(own, Folder)) or section.root in ("auto", own.root):
        return section
    stale = [name for name in ("train_root", "val_root") if getattr(section, name) == getattr(own, name)]
    return section.model_copy(update=dict.fromkeys(stale, "auto"))


def _check_channels(test: DatasetInfo, own: DatasetInfo) -> None:
    if test.channels != own.channels:
        raise DataError(
            f"data.source: {test.name} is read with {count(test.channels, 'channel')}, and the run's network reads "
            f"{own.channels} (set data.source.channels={own.channels} where it has that, or name another set)"
        )


def _judging(recipe: Recipe, own: Recipe, facts: Facts, test: Source) -> Recipe:
    """Return `recipe` for another set: no training images, whoever can read it, and sized as the run's own was."""
    data = recipe.data
    loader = "auto" if data.loader in ("native", "device") else data.loader
    is_sized_alike = not facts.is_pixels or isinstance(test, ArraySource) or data.eval_resize != own.data.eval_resize
    resize = data.eval_resize if is_sized_alike else "stretch"  # pixels are never cut
    return recipe.model_copy(
        update={
            "data": data.model_copy(update={"loader": loader, "eval_resize": resize}),
            "train": recipe.train.model_copy(update={"eval_train": "off"}),
        }
    )


def _as_of_run(test: Source, own: DatasetInfo) -> Datasets:
    numbers = matched(test.info.class_names, own.class_names)
    judged = replace(own, name=test.info.name, split="val", num_images=len(test), notes=test.info.notes)
    return Datasets(_relabelled(test, own, numbers), _relabelled(test, judged, numbers))


def _relabelled(test: Source, info: DatasetInfo, numbers: tuple[int, ...]) -> Source:
    """Return `test` with the classes of `info`; pixels in memory stay that, which loaders make use of."""
    if isinstance(test, ArraySource):
        table: NDArray[np.int64] = np.array(numbers, dtype=np.int64)
        return ArraySource(info, test.images, table[test.labels])
    return Relabelled(info, test, numbers)


def _warning(section: SourceSection, own: SourceSection) -> str:
    """Return what is to be known of the images' part in training.

    Raise `DataError` where they are those of the run's own folder, from which it held some out and not only these.
    """
    if not (isinstance(section, Folder) and isinstance(own, Folder) and is_trained_on(section, own)):
        return "it tells of new images where the run was trained on none of these"
    if folder_roots(own)[1] is None:
        raise DataError(
            "data.source: is the folder that the run was trained on, of which other images would be held out (leave "
            "val_fraction and split_seed out, or name a folder of images that it was not trained on)"
        )
    return "the run was trained on these, so it tells nothing of new ones"


def _note(test: Source, own: DatasetInfo, warning: str) -> str:
    classes = f"{test.info.num_classes:,} of the run's {own.num_classes:,} classes"
    return f"data.source: the accuracy is of {count(len(test), 'image')} of {classes}; {warning}"
