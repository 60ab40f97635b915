"""The kernel's page cache: have files in it, or out of it, before something is measured that reads them."""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from paceline.core.dataset import ArraySource, Source
from paceline.data.pack.reader import PackSource
from paceline.data.pack.shards import LocalShards
from paceline.data.sources.encoded import EncodedSource
from paceline.lab.part import Part


def files_of(source: Source) -> list[Path]:
    """Return the files on this machine that the samples of a split are read from; none where that is not known."""
    match source:
        case EncodedSource():
            return [source.path_of(index) for index in range(len(source))]
        case Part(source=EncodedSource() as whole, indices=indices):
            return [whole.path_of(index) for index in indices.tolist()]
        case PackSource(files=LocalShards() as shards):
            return [shards.folder / file.name for file in shards.files]
    return []


def drop(files: Iterable[Path]) -> None:
    """Ask the kernel to forget what it holds of `files`. It need not: on tmpfs, and where they are mapped, it does not.

    No rights are needed but those to read them (posix_fadvise(2), POSIX_FADV_DONTNEED).
    """
    for path in files:
        with contextlib.suppress(OSError):  # one that is gone is not in the cache either
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def warm(source: Source, num_images: int) -> None:
    """Read the first `num_images` samples, so that the kernel holds them."""
    match source:
        case ArraySource(images=images):
            np.add.reduce(images[:num_images], axis=None, dtype=np.int64)
        case PackSource():
            for index in range(num_images):
                source.stored(index)
        case _:
            for index in range(num_images):
                source.read(index)
