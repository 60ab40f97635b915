"""Compute the digest of a dataset, and get the labels of a split without reading images. Torch-free."""

import hashlib
from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from paceline.core.dataset import ArraySource, Datasets, Source
from paceline.data.bad_images import ImageError
from paceline.data.pack.reader import PackSource
from paceline.data.sources.huggingface import HuggingFaceSource
from paceline.data.sources.image_files import ImageFileSource
from paceline.data.sources.lmdb import LmdbSource
from paceline.data.sources.plugin import PluginSamples
from paceline.data.sources.subset import SourceSubset
from paceline.data.sources.webdataset import WebDatasetSource

# Samples of a plugin that are read for the digest: reading all would take an epoch.
_NUM_SAMPLES_READ: Final = 64


def digest_datasets(datasets: Datasets) -> str:
    """Return 16 hex digits that identify both splits: classes, labels, and names or pixels, in order.

    Files count by their paths below the root or in the tar, not by their content. A plugin's samples count by their
    number and the content of 64 of them.
    """
    # Hashing CIFAR-10's pixels takes 0.1 s on a core with SHA instructions (measured).
    digest = hashlib.sha256()
    for source in (datasets.train, datasets.val):
        digest.update(digest_split(source))
    return digest.hexdigest()[:16]


def digest_split(source: Source) -> bytes:
    """Return the digest of a split, 32 bytes."""
    # A converted dataset has the digest of its source, so that runs on both count as runs on the same data.
    match source:
        case LmdbSource(digest=digest) | PackSource(digest=digest, rows=None):
            return digest
    return _hash_split(source)


def _hash_split(source: Source) -> bytes:
    digest = hashlib.sha256()
    names = "\0".join(source.info.class_names).encode("utf-8", "surrogateescape")
    form, targets = source.info.pixel_format, source.info.targets
    kind = f"{form.channels} {form.pixels}" if form.is_wide else str(form.channels)
    table = () if targets is None else (np.ascontiguousarray(targets.rows, dtype="<f4").tobytes(),)
    for field in (names, kind.encode(), *_hash_inputs(source), *table):
        digest.update(len(field).to_bytes(8, "little"))  # so that no sequence of fields hashes like another
        digest.update(field)
    return digest.digest()


def _hash_inputs(source: Source) -> tuple[bytes | memoryview, ...]:
    match source:
        case ArraySource(images=images, labels=labels):
            return (
                str(images.shape).encode(),
                _little_endian_bytes(images),
                _little_endian_bytes(labels.astype(np.int64)),
            )
        case SourceSubset(sources=sources, indices=indices):
            return *map(digest_split, sources), _little_endian_bytes(indices)
        # Samples of a pack have the digest of the files, unless they are not the same pixels.
        case PackSource(names=names) if source.index.meta.made.resize or not names.joined:
            assert source.rows is not None, "a whole split of a pack has a digest"
            return source.digest, _little_endian_bytes(source.rows)
        case (
            ImageFileSource(paths=names, labels=labels)
            | WebDatasetSource(names=names, labels=labels)
            | PackSource(names=names, labels=labels)
        ):
            return names.joined, _little_endian_bytes(names.ends), _little_endian_bytes(labels.astype(np.int64))
        case HuggingFaceSource(labels=labels):
            return "\0".join(source.names()).encode("utf-8", "surrogatepass"), _little_endian_bytes(
                labels.astype(np.int64)
            )
        case PluginSamples(labels=labels):
            known = () if labels is None else (_little_endian_bytes(labels),)
            return *_read_some_samples(source), *known
    return ("\0".join(source.name_of(index) for index in range(len(source))).encode("utf-8", "surrogateescape"),)


def _read_some_samples(source: PluginSamples) -> Iterator[bytes]:
    # The number of samples, then label and content of some, evenly spaced.
    yield str(len(source)).encode()
    for index in np.unique(
        np.linspace(0, len(source) - 1, min(len(source), _NUM_SAMPLES_READ), dtype=np.int64)
    ).tolist():
        try:
            content, label = source.read(index)
        except ImageError:
            yield b"unread"
            continue
        yield str(label).encode()
        yield content if isinstance(content, bytes) else str(content.shape).encode() + content.tobytes()


def _little_endian_bytes(values: NDArray[np.integer | np.floating]) -> memoryview:
    # In C order, and the same on every machine.
    return np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<")).reshape(-1).view(np.uint8).data


def get_labels(source: Source) -> NDArray[np.integer] | None:
    """Return the labels, integers [N], or None if they come only with the images."""
    match source:
        case (
            ArraySource(labels=labels)
            | ImageFileSource(labels=labels)
            | PackSource(labels=labels)
            | LmdbSource(labels=labels)
            | WebDatasetSource(labels=labels)
            | HuggingFaceSource(labels=labels)
        ):
            return np.asarray(labels)
        case SourceSubset(sources=sources, indices=indices):
            known = [of_each for each in sources if (of_each := get_labels(each)) is not None]
            return np.concatenate(known)[indices] if len(known) == len(sources) else None
        case PluginSamples(labels=labels):
            return labels
    return None
