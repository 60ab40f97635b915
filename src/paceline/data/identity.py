"""What data a run was trained on, as a short digest that moves with the data. Torch-free."""

import hashlib
from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from paceline.core.dataset import ArraySource, Datasets, Source
from paceline.data.bad import ImageError
from paceline.data.pack.reader import PackSource
from paceline.data.sources.encoded import EncodedSource
from paceline.data.sources.huggingface import HuggingFaceSource
from paceline.data.sources.lmdb import LmdbSource
from paceline.data.sources.own import OwnSamples
from paceline.data.sources.webdataset import WebDatasetSource

_NUM_READ: Final = 64
"""Samples of somebody's own code that are read for the digest: reading all would take an epoch."""


def dataset_digest(datasets: Datasets) -> str:
    """Return 16 hex digits over both splits: their classes, and each sample's label and name or pixels, in order.

    Of files it is the paths as they are listed, relative to their root, that count, and of files in tars their names
    there: neither where the root is nor what is in them, which would take an epoch to read. Pixels in memory count
    themselves (CIFAR-10: 0.1 s of a core that has SHA instructions, measured). Of samples that a user's own code reads
    it is their number, and what 64 of them are; the code's name may change.
    """
    whole = hashlib.sha256()
    for source in (datasets.train, datasets.val):
        whole.update(split_digest(source))
    return whole.hexdigest()[:16]


def split_digest(source: Source) -> bytes:
    """Return the digest of a split, 32 bytes; of what was packed, that of what it was made from, which it carries."""
    match source:
        case LmdbSource(digest=digest) | PackSource(digest=digest):
            return digest
    return _digest(source)


def _digest(source: Source) -> bytes:
    """Return the digest of what is in a split. Every part is preceded by its length: none can pass for another."""
    found = hashlib.sha256()
    names = "\0".join(source.info.class_names).encode("utf-8", "surrogateescape")
    for part in (names, str(source.info.channels).encode(), *_samples(source)):
        found.update(len(part).to_bytes(8, "little"))
        found.update(part)
    return found.digest()


def _samples(source: Source) -> tuple[bytes | memoryview, ...]:
    match source:
        case ArraySource(images=images, labels=labels):
            return str(images.shape).encode(), _plain(images), _plain(labels.astype(np.int64))
        case EncodedSource(paths=paths, ends=ends, labels=labels):
            return paths, _plain(ends), _plain(labels.astype(np.int64))
        case WebDatasetSource(names=names, name_ends=ends, labels=labels):
            return names, _plain(ends), _plain(labels.astype(np.int64))
        case HuggingFaceSource(labels=labels):
            return "\0".join(source.names()).encode("utf-8", "surrogatepass"), _plain(labels.astype(np.int64))
        case OwnSamples():
            return tuple(_some_samples(source))
    return ("\0".join(source.name_of(index) for index in range(len(source))).encode("utf-8", "surrogateescape"),)


def _some_samples(source: OwnSamples) -> Iterator[bytes]:
    """Yield the number of samples, and labels and contents of some, spread evenly; what cannot be read has neither."""
    yield str(len(source)).encode()
    for index in np.unique(np.linspace(0, len(source) - 1, min(len(source), _NUM_READ), dtype=np.int64)).tolist():
        try:
            content, label = source.read(index)
        except ImageError:
            yield b"unread"
            continue
        yield str(label).encode()
        yield content if isinstance(content, bytes) else str(content.shape).encode() + content.tobytes()


def _plain(values: NDArray[np.integer]) -> memoryview:
    """Return the bytes of an array in rows, the lowest byte first on every machine."""
    return np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<")).reshape(-1).view(np.uint8).data
