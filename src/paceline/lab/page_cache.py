"""Read files into the kernel's page cache, or evict them, before a run that reads them is measured."""

import contextlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from paceline.core.dataset import ArraySource, Source
from paceline.core.errors import RecipeError
from paceline.core.units import count
from paceline.data.bad_images import ImageError
from paceline.data.order import TrainOrder
from paceline.data.pack.reader import PackSource
from paceline.data.pack.shards import LocalShards
from paceline.data.sampler import ShuffleSampler
from paceline.data.sources.folds import build_run_datasets
from paceline.data.sources.image_files import ImageFileSource
from paceline.data.sources.lmdb import LmdbSource
from paceline.data.sources.subset import SourceSubset, select_samples
from paceline.data.sources.webdataset import WebDatasetSource
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.data import Data
from paceline.recipe.schema.source import Folder, HuggingFace, Lmdb, Manifest, Pack, WebDataset
from paceline.recipe.schema.train import Train


def prepare_page_cache(recipe: Recipe, *, is_cold: bool) -> None:
    """Read the files of a run of `recipe` into the page cache, or evict them.

    In-memory sources and staged copies (`data.stage`) are ignored if warm. Raise `RecipeError` for a cold run that
    cannot be cold: it reads nothing from disk, or an image twice.
    """
    data = recipe.data
    is_from_files = isinstance(data.source, Folder | Manifest | Pack | Lmdb | WebDataset | HuggingFace)
    if is_cold:
        _check_reads_from_disk(data, is_from_files=is_from_files)
    elif data.stage != "off" or not is_from_files:
        return
    source = build_run_datasets(data, may_download=True, skip_bad=data.on_bad_image == "skip").train
    sampler = ShuffleSampler(is_random=data.order == "random")
    order = TrainOrder(recipe.seed, len(source), data.global_batch_size, sampler=sampler)
    steps = _count_steps(recipe.train, order.steps_per_epoch)
    # All ranks together read whole batches of the global order. Another sampler may read any image.
    indices = np.arange(len(source), dtype=np.int64)
    if steps < order.steps_per_epoch and data.sampler.name == "shuffle":
        indices = np.sort(np.concatenate([order.indices(step) for step in range(steps)]))
    subset = select_samples(source, indices)
    if not is_cold:
        read_into_cache(subset, len(subset))
        return
    check_reads_once(steps, data.global_batch_size, len(source), recipe.measure.warmup_steps)
    files = list_source_files(subset)
    if not files:
        raise RecipeError(
            f"data.source.name: of {data.source.name} it is not known which files it reads, so no run of it can "
            f"be cold (leave out `cache: cold`)"
        )
    del source, subset  # mapped pages of an open source would stay in the cache
    evict_files(files)


def check_reads_once(steps: int, batch_size: int, num_images: int, warmup_steps: int) -> None:
    """Raise `RecipeError` unless a run of `steps` steps reads each of `num_images` training images at most once."""
    if steps * batch_size <= num_images:
        return
    counted = num_images // batch_size - warmup_steps
    smaller = num_images // steps
    fixes = [f"ask for --steps {counted}"] if counted > 0 else []
    fixes += [f"set data.batch_size={smaller}"] if smaller else []
    raise RecipeError(
        f"train.steps: {count(steps, 'step')} of {count(batch_size, 'image')} read more than the {num_images:,} of "
        f"training, and a second time they come from memory: the run is not cold ({' or '.join(fixes) or 'add images'})"
    )


def _check_reads_from_disk(data: Data, *, is_from_files: bool) -> None:
    if data.stage != "off":
        raise RecipeError(
            f"data.stage: {data.stage} makes the run read a fresh copy, so it cannot be cold (set "
            f"data.stage=off, or leave out `cache: cold`)"
        )
    if data.sampler.name != "shuffle":
        raise RecipeError(
            f"data.sampler: {data.sampler.name} may read an image twice, and then it comes from memory, so no run is "
            f"cold (set data.sampler=shuffle, or leave out `cache: cold`)"
        )
    if not is_from_files:
        raise RecipeError(
            f"data.source.name: {data.source.name} is read into memory before the first step, so no step is cold "
            f"(leave out `cache: cold`)"
        )


def _count_steps(train: Train, steps_per_epoch: int) -> int:
    if train.epochs == "auto":
        assert train.steps != "auto", "the schema lets exactly one through"
        return train.steps
    return round(train.epochs * steps_per_epoch)


def list_source_files(source: Source) -> list[Path]:
    """Return the local files that the samples of a split are read from; [] if unknown."""
    match source:
        case ImageFileSource():
            return [source.get_path(index) for index in range(len(source))]
        case SourceSubset(sources=sources):
            return [file for each in sources for file in list_source_files(each)]
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
    read: Callable[[int], object] = source.read
    match source:
        case ArraySource(images=images):
            np.add.reduce(images[:num_images], axis=None, dtype=np.int64)
            return
        case PackSource():
            read = source.read_stored
    for index in range(num_images):
        with contextlib.suppress(ImageError):
            read(index)
