"""Read files into the kernel's page cache, or evict them, before a run that reads them is measured."""

import contextlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.core.dataset import ArraySource, Source
from paceline.core.errors import RecipeError
from paceline.core.units import count
from paceline.data.bad_images import ImageError
from paceline.data.order import TrainOrder
from paceline.data.pack.reader import PackSource
from paceline.data.pack.shards import LocalShards
from paceline.data.sources.build import build_datasets
from paceline.data.sources.image_files import ImageFileSource
from paceline.data.sources.lmdb import LmdbSource
from paceline.data.sources.webdataset import WebDatasetSource
from paceline.lab.dataset_stats import SourceSubset, select_samples
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.data import Data
from paceline.recipe.schema.source import Folder, HuggingFace, Lmdb, Manifest, Pack, WebDataset


def prepare_page_cache(recipe: Recipe, *, is_cold: bool) -> None:
    """Read the files of a run of `recipe` into the page cache, or evict them.

    In-memory sources and staged copies (`data.stage`) are ignored if warm. Raise `RecipeError` for a cold run that
    cannot be cold: it reads nothing from disk, or an image twice.
    """
    data = recipe.data
    if is_cold:
        _check_reads_from_disk(data)
        evict_files(_find_cold_files(recipe))  # sources are closed by now: mapped pages would stay in the cache
    elif data.stage == "off" and _is_file_source(data):
        source = _build_train_source(data)
        subset = select_samples(source, _select_indices(recipe, len(source)))
        read_into_cache(subset, len(subset))


def _build_train_source(data: Data) -> Source:
    return build_datasets(data.source, may_download=True, skip_bad=data.on_bad_image == "skip").train


def _find_cold_files(recipe: Recipe) -> list[Path]:
    source = _build_train_source(recipe.data)
    check_reads_once(recipe, len(source))
    files = list_source_files(select_samples(source, _select_indices(recipe, len(source))))
    if not files:
        raise RecipeError(
            f"data.source.name: of {recipe.data.source.name} it is not known which files it reads, so no run of it can "
            f"be cold (leave out `cache: cold`)"
        )
    return files


def check_reads_once(recipe: Recipe, num_images: int) -> None:
    """Raise `RecipeError` unless a run reads each of `num_images` training images at most once."""
    steps, batch_size = _count_steps(recipe, num_images), recipe.data.global_batch_size
    if steps * batch_size <= num_images:
        return
    counted = num_images // batch_size - recipe.measure.warmup_steps
    smaller = num_images // steps
    fixes = [f"ask for --steps {counted}"] if counted > 0 else []
    fixes += [f"set data.batch_size={smaller}"] if smaller else []
    raise RecipeError(
        f"train.steps: {count(steps, 'step')} of {count(batch_size, 'image')} read more than the {num_images:,} of "
        f"training, and a second time they come from memory: the run is not cold ({' or '.join(fixes) or 'add images'})"
    )


def _is_file_source(data: Data) -> bool:
    return isinstance(data.source, Folder | Manifest | Pack | Lmdb | WebDataset | HuggingFace)


def _check_reads_from_disk(data: Data) -> None:
    if data.stage != "off":
        raise RecipeError(
            f"data.stage: {data.stage} makes the run read a fresh copy, so it cannot be cold (set "
            f"data.stage=off, or leave out `cache: cold`)"
        )
    if not _is_file_source(data):
        raise RecipeError(
            f"data.source.name: {data.source.name} is read into memory before the first step, so no step is cold "
            f"(leave out `cache: cold`)"
        )


def _count_steps(recipe: Recipe, num_images: int) -> int:
    train = recipe.train
    if train.epochs == "auto":
        assert train.steps != "auto", "the schema lets exactly one through"
        return train.steps
    return round(train.epochs * (num_images // recipe.data.global_batch_size))


def _select_indices(recipe: Recipe, num_images: int) -> NDArray[np.int64]:
    # All ranks together read whole batches of the global order.
    data, steps = recipe.data, _count_steps(recipe, num_images)
    order = TrainOrder(recipe.seed, num_images, data.global_batch_size, is_random=data.order == "random")
    if steps >= order.steps_per_epoch:
        return np.arange(num_images, dtype=np.int64)
    return np.sort(np.concatenate([order.indices(step) for step in range(steps)]))


def list_source_files(source: Source) -> list[Path]:
    """Return the local files that the samples of a split are read from; [] if unknown."""
    match source:
        case ImageFileSource():
            return [source.get_path(index) for index in range(len(source))]
        case SourceSubset(source=ImageFileSource() as whole, indices=indices):
            return [whole.get_path(index) for index in indices.tolist()]
        case SourceSubset(source=whole):
            return list_source_files(whole)
        case PackSource(files=LocalShards() as shards):
            return [shards.folder / file.name for file in shards.files]
        case LmdbSource(path=path):
            return [Path(path)]
        case WebDatasetSource(files=tars):
            return [Path(path) for path in tars.paths]
    return []


def evict_files(files: Iterable[Path]) -> None:
    """Ask the kernel to evict `files` from the page cache (posix_fadvise(2), POSIX_FADV_DONTNEED).

    Needs read permission only. It has no effect on tmpfs and on mapped files.
    """
    for path in files:
        with contextlib.suppress(OSError):  # a missing file is not cached either
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                # Dirty pages would stay, so write them first.
                with contextlib.suppress(OSError):  # some file systems do not support it
                    os.fdatasync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def read_into_cache(source: Source, num_images: int) -> None:
    """Read the first `num_images` samples into the page cache, skipping unreadable ones."""
    match source:
        case ArraySource(images=images):
            np.add.reduce(images[:num_images], axis=None, dtype=np.int64)
        case PackSource():
            _read_each(source.read_stored, range(num_images))
        case SourceSubset(source=PackSource() as whole, indices=indices):
            _read_each(whole.read_stored, indices[:num_images].tolist())
        case _:
            _read_each(source.read, range(num_images))


def _read_each(read: Callable[[int], object], indices: Iterable[int]) -> None:
    for index in indices:
        with contextlib.suppress(ImageError):
            read(index)
