"""Read the dataset of a run, or another dataset to evaluate its weights on.

Classes of another dataset are matched by name. A dataset with the run's digest is the run's own in another location; of
that, only the validation split is evaluated.
"""

import contextlib
import json
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.core.dataset import ArraySource, DatasetInfo, Datasets, Sample, Source, TargetTable, has_one_size
from paceline.core.errors import DataError, suggest_similar
from paceline.core.run_dir import RunDir
from paceline.core.units import count
from paceline.data.decode_array import decode_pixels
from paceline.data.sources.build import build_datasets
from paceline.data.sources.fingerprint import digest_datasets
from paceline.data.sources.folder import is_trained_on, load_test_folder, resolve_folder_roots
from paceline.data.sources.folds import select_fold
from paceline.data.sources.statistics import Statistics, measure_statistics, needs_statistics, with_statistics
from paceline.data.staging.stage import stage_for_run
from paceline.parallel.process_group import RankStore, local_rank_zero_first
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.data import Data
from paceline.recipe.schema.source import Folder, SourceSection
from paceline.training.checkpoint import read_state
from paceline.training.trained_dataset import TrainedDataset, read_trained_dataset

_MAX_NAMED = 10


@dataclass(frozen=True)
class RelabeledSource:
    """A source whose label n becomes `label_map[n]`, in the class list of `info`."""

    info: DatasetInfo
    source: Source
    label_map: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.source)

    def read(self, index: int) -> Sample:
        """Return (encoded bytes or pixels [H, W, C], label). Raise `DataError` as the source does."""
        content, label = self.source.read(index)
        return content, self.label_map[label]

    def name_of(self, index: int) -> str:
        """Return the name of the sample."""
        return self.source.name_of(index)


@dataclass(frozen=True)
class DecodedSource:
    """A source of pixels, decoded from image files, so that torch resizes them as in training, not Pillow."""

    source: Source

    @property
    def info(self) -> DatasetInfo:
        """The source's dataset information."""
        return self.source.info

    def __len__(self) -> int:
        return len(self.source)

    def read(self, index: int) -> Sample:
        """Return (pixels [H, W, C], label). Raise `DataError` as the source does, and for undecodable images."""
        content, label = self.source.read(index)
        return decode_pixels(content, self.info.pixel_format, name=self.name_of(index)), label

    def name_of(self, index: int) -> str:
        """Return the name of the sample."""
        return self.source.name_of(index)


@dataclass(frozen=True)
class EvalData:
    """The recipe and datasets of an evaluation, and a note for the user, empty for the run's own dataset.

    Of another dataset both splits are the evaluated images, the training split with the run's `DatasetInfo`.
    """

    recipe: Recipe
    datasets: Datasets
    note: str = ""


def read_eval_dataset(
    recipe: Recipe, run_recipe: Recipe, trained: TrainedDataset, digest: str, *, is_first: bool
) -> EvalData:
    """Return the dataset of `recipe` to evaluate a run of `run_recipe`, trained on `trained` with `digest`, on.

    Raise `DataError` for an unreadable dataset, an unknown class or other channels, and for the run's own folder with
    another split, which would evaluate training images.
    """
    # The data is read in place, not staged: each image is read once.
    section = _without_stale_roots(recipe.data.source, run_recipe.data.source)
    skip_bad = recipe.data.on_bad_image == "skip"
    try:
        datasets = build_datasets(section, may_download=is_first, skip_bad=skip_bad)
        with contextlib.suppress(DataError):  # other images may have other groups
            fold = select_fold(datasets, recipe.data)
            if digest_datasets(fold) == digest:
                return EvalData(recipe, fold)
        test = datasets.val
    except DataError:
        if not isinstance(section, Folder):  # a folder to evaluate on needs no training images
            raise
    if isinstance(section, Folder):
        test = load_test_folder(section, skip_bad=skip_bad)
    eval_recipe, test = adapt_to_run(recipe, run_recipe, trained, test)
    warning = _describe_overlap(section, run_recipe.data.source)
    return EvalData(
        eval_recipe,
        _with_run_classes(test, trained),
        _build_note(test, trained.info, warning),
    )


def adapt_to_run(recipe: Recipe, run_recipe: Recipe, trained: TrainedDataset, source: Source) -> tuple[Recipe, Source]:
    """Return `recipe` and `source`, images of another dataset, as the model of a run on `trained` takes them.

    Raise `DataError` for other channels or another type of pixels.
    """
    _check_channels(source.info, trained.info)
    if trained.is_pixels and not isinstance(source, ArraySource):
        source = DecodedSource(source)
    return _build_eval_recipe(recipe, run_recipe, trained, source), source


def match_classes(names: Sequence[str], known: Sequence[str]) -> tuple[int, ...]:
    """Return the index in `known` of each class of `names`. Raise `DataError` for an unknown class."""
    # NFC: file systems normalize folder names differently.
    numbers = {unicodedata.normalize("NFC", name): number for number, name in enumerate(known)}
    for name in names:
        if unicodedata.normalize("NFC", name) not in numbers:
            some = ", ".join(known[:_MAX_NAMED]) + (", ..." if len(known) > _MAX_NAMED else "")
            raise DataError(
                f"data.source: class '{name}' is not one of the {len(known):,} that the run was trained on"
                f"{suggest_similar(name, known)}; rename it or leave it out (they are {some})"
            )
    return tuple(numbers[unicodedata.normalize("NFC", name)] for name in names)


def _without_stale_roots(section: SourceSection, trained: SourceSection) -> SourceSection:
    """Return `section` without `train_root` and `val_root` of the run, if it has another root."""
    if not (isinstance(section, Folder) and isinstance(trained, Folder)) or section.root in ("auto", trained.root):
        return section
    stale = [name for name in ("train_root", "val_root") if getattr(section, name) == getattr(trained, name)]
    return section.model_copy(update=dict.fromkeys(stale, "auto"))


def _check_channels(test: DatasetInfo, trained: DatasetInfo) -> None:
    if test.channels != trained.channels:
        raise DataError(
            f"data.source: {test.name} is read with {count(test.channels, 'channel')}, and the run's model expects "
            f"{trained.channels} (set data.source.channels={trained.channels} if possible, or name another dataset)"
        )
    if test.pixels != trained.pixels:
        raise DataError(
            f"data.source: {test.name} has {test.pixels} pixels, and the run was trained on {trained.pixels} "
            f"(set data.source.pixels={trained.pixels}, or name another dataset)"
        )


def _build_eval_recipe(recipe: Recipe, run_recipe: Recipe, trained: TrainedDataset, test: Source) -> Recipe:
    """Return `recipe` for another dataset: no training images, any loader, the run's resizing."""
    data = recipe.data
    loader = "auto" if data.loader in ("native", "device") else data.loader
    has_same_resize = not trained.are_one_size or has_one_size(test) or data.eval_resize != run_recipe.data.eval_resize
    resize = data.eval_resize if has_same_resize else "stretch"  # images of one size are never cropped
    return recipe.model_copy(
        update={
            "data": data.model_copy(update={"loader": loader, "eval_resize": resize}),
            "train": recipe.train.model_copy(update={"eval_train": "off"}),
        }
    )


def _with_run_classes(test: Source, trained: TrainedDataset) -> Datasets:
    numbers, info, targets = match_classes(test.info.class_names, trained.info.class_names), trained.info, None
    if test.info.targets is not None or trained.is_multi_label:
        rows = np.eye(len(numbers), dtype=np.float32) if test.info.targets is None else test.info.targets.rows
        targets = TargetTable(np.zeros((len(rows), info.num_classes), dtype=np.float32))
        targets.rows[:, numbers] = rows
        numbers = tuple(range(len(rows)))  # the columns of the table are relabeled, so the labels stay
    info = replace(info, targets=targets)
    eval_info = replace(info, name=test.info.name, split="val", num_images=len(test), notes=test.info.notes)
    eval_info = replace(eval_info, image_size=test.info.image_size)  # which says how they are resized
    return Datasets(_relabel(test, info, numbers), _relabel(test, eval_info, numbers))


def _relabel(test: Source, info: DatasetInfo, label_map: tuple[int, ...]) -> Source:
    if isinstance(test, ArraySource):  # loaders have a fast path for it
        table: NDArray[np.int64] = np.array(label_map, dtype=np.int64)
        return ArraySource(info, test.images, table[test.labels])
    return RelabeledSource(info, test, label_map)


def _describe_overlap(section: SourceSection, trained: SourceSection) -> str:
    """Return whether the run was trained on these images, as a sentence.

    Raise `DataError` for the run's own folder if a random split chose its validation images.
    """
    if not (isinstance(section, Folder) and isinstance(trained, Folder) and is_trained_on(section, trained)):
        return "it measures generalization if the run was trained on none of these"
    if resolve_folder_roots(trained)[1] is None:
        raise DataError(
            "data.source: is the folder that the run was trained on, with another split (remove val_fraction and "
            "split_seed, or name a folder of images that it was not trained on)"
        )
    return "the run was trained on these images, so it does not measure generalization"


def _build_note(test: Source, trained: DatasetInfo, warning: str) -> str:
    classes = f"{test.info.num_classes:,} of the run's {trained.num_classes:,} classes"
    return f"data.source: accuracy is measured on {count(len(test), 'image')} from {classes}; {warning}"


ReadData = Callable[[contextlib.ExitStack, bool], tuple[Recipe, Datasets]]
"""Returns recipe and datasets, given an exit stack for resources and whether the rank is first on its node."""


def read_run_data(recipe: Recipe, exit_stack: contextlib.ExitStack, is_first: bool) -> tuple[Recipe, Datasets]:
    """Read both splits, or a fold of them.

    The first rank of a node downloads or stages them; `exit_stack` unlocks a staged copy.
    """
    data = recipe.data
    skip_bad = data.on_bad_image == "skip"
    section = exit_stack.enter_context(stage_for_run(data.source, data.stage, is_first=is_first, skip_bad=skip_bad))
    return recipe, select_fold(build_datasets(section, may_download=is_first, skip_bad=skip_bad), data)


def read_eval_data(
    recipe: Recipe,
    run_recipe: Recipe,
    checkpoint: Path,
    report: Callable[[str], None],
    exit_stack: contextlib.ExitStack,
    is_first: bool,
) -> tuple[Recipe, Datasets]:
    """Read the dataset of `recipe` to evaluate `checkpoint` on; `run_recipe` is that of its run."""
    if recipe.data.source == run_recipe.data.source:
        recipe, datasets = read_run_data(recipe, exit_stack, is_first)
        if recipe.data.split == run_recipe.data.split:
            return recipe, datasets
        trained_split = run_recipe.data.split
        if recipe.data.split != "off" or (trained_split != "off" and trained_split.pool == "all"):
            report("data.split: the run was trained on some of these images, so it does not measure generalization")
        # Other images of the dataset: normalized as in training.
        info = read_trained_dataset(RunDir(checkpoint.parent.parent)).info
        return recipe, with_statistics(datasets, Statistics(info.mean, info.std))
    trained = read_trained_dataset(RunDir(checkpoint.parent.parent))
    digest = str(read_state(checkpoint).get("dataset", ""))
    eval_data = read_eval_dataset(recipe, run_recipe, trained, digest, is_first=is_first)
    if eval_data.note:
        report(eval_data.note)
    return eval_data.recipe, eval_data.datasets


def share_statistics(
    data: Data, datasets: Datasets, store: RankStore, on_wait: Callable[[], None], trained: RunDir | None
) -> Datasets:
    """Return `datasets` with mean and standard deviation, which rank 0 measures if they are not known. Collective.

    Of a run on the same images, in the run directory `trained`, they are what that has measured.
    """
    if not needs_statistics(datasets.train.info, data):
        return datasets

    def measure(_: bool) -> str:
        if not store.world.is_main:
            return ""
        known = _recorded_statistics(trained, datasets.train.info) if trained else None
        return json.dumps(known or measure_statistics(datasets.train, skip_bad=data.on_bad_image == "skip"))

    mean, std = json.loads(store.broadcast("statistics", local_rank_zero_first(store, measure, on_wait, "statistics")))
    return with_statistics(datasets, Statistics(tuple(mean), tuple(std)))


def _recorded_statistics(trained: RunDir, info: DatasetInfo) -> Statistics | None:
    if not trained.dataset.exists():
        return None
    recorded = read_trained_dataset(trained).info
    same = replace(recorded, image_size=info.image_size, mean=info.mean, std=info.std, notes=info.notes) == info
    return Statistics(recorded.mean, recorded.std) if same and recorded.mean else None


def discard_message(sentence: str) -> None:
    """Discard a message."""
