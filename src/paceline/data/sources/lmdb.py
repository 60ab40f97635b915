"""Load a data set from an LMDB that paceline has written, with random access from any process or thread."""

import math
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.core.dataset import ArraySource, DatasetInfo, Datasets, Sample, Source, Split
from paceline.core.errors import DataError
from paceline.data.bad import ImageError
from paceline.data.sources.lmdb_layout import (
    MAX_METADATA_BYTES,
    METADATA_CRC_KEY,
    METADATA_KEY,
    SAMPLE_TAIL,
    LmdbMetadata,
    LmdbSplitMetadata,
    build_labels_key,
    build_sample_key,
    decode_sample,
    parse_metadata,
    read_sample_name,
)
from paceline.data.sources.lmdb_pages import LmdbFormatError, LmdbReader
from paceline.data.sources.open_files import MAX_SAMPLE_BYTES
from paceline.data.sources.places import expand_path, is_file, printable
from paceline.recipe.schema.source import Lmdb

LMDB_FIX = "copy it again, or write it again with paceline data pack --format lmdb"
_SPLITS: tuple[Split, Split] = ("train", "val")


# `lmdb_pages` reads the file, not the LMDB library: the library trusts the file that it maps, can open it only once per
# process and not across a fork, and crashes on a truncated file. Damaged files raise `DataError`. A CRC-32 per sample
# detects damage but not manipulation. Opening reads a few pages; memory holds 4 bytes per label.
@dataclass(frozen=True, eq=False)
class LmdbSource:
    """The encoded images of a split in the file at `path`.

    `labels` is int32 [N]; `digest` is the `identity.split_digest` of the split that was written.
    """

    info: DatasetInfo
    path: str
    reader: LmdbReader
    labels: NDArray[np.int32]
    digest: bytes

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> Sample:
        """Return (image file bytes, label). Raise `ImageError` for a damaged sample."""
        label = int(self.labels[index])
        try:
            return _read_image(self.reader, self.info.split, index, label), label
        except ValueError as error:
            raise ImageError(self._describe_sample(index), f"is damaged: {error}", LMDB_FIX) from error

    def name_of(self, index: int) -> str:
        """Return the name that the sample had in its original source, or its key here if that cannot be read."""
        try:
            start, length = self.reader.locate(build_sample_key(self.info.split, index))
            name_bytes, _ = SAMPLE_TAIL.unpack(self.reader.read(start + length - SAMPLE_TAIL.size, SAMPLE_TAIL.size))
            num_bytes = min(length, SAMPLE_TAIL.size + name_bytes)
            return read_sample_name(self.reader.read(start + length - num_bytes, num_bytes)) or self._describe_sample(
                index
            )
        except ValueError:
            return self._describe_sample(index)

    def _describe_sample(self, index: int) -> str:
        return f"{printable(self.path)}[{build_sample_key(self.info.split, index).decode()}]"


def load_lmdb(section: Lmdb) -> Datasets:
    """Load the two splits of an LMDB: encoded images on access, pixels of one size (CIFAR) into memory.

    Raise `DataError` for a missing, foreign, truncated or damaged file.
    """
    root = expand_path(section.root)
    path = root / "data.mdb"
    if not is_file(path):
        raise DataError(
            f"data.source.root: {printable(root)} has no data.mdb (set it to the folder that paceline data pack "
            f"--format lmdb has written)"
        )
    return open_lmdb(path.absolute())


def open_lmdb(path: Path) -> Datasets:
    """Open the two splits in the file at `path`."""
    try:
        tree = LmdbReader(path)
        facts = _read_metadata(tree)
        expected = 4 + facts.train.num_images + facts.val.num_images
        if tree.num_entries != expected:
            raise LmdbFormatError(f"has {tree.num_entries:,} entries, and {expected:,} were written")
        train, val = (_build_lmdb_source(tree, path, split, facts) for split in _SPLITS)
    except LmdbFormatError as error:
        raise DataError(f"{printable(path)}: {error}; {LMDB_FIX}") from error
    return Datasets(train, val)


def _read_metadata(tree: LmdbReader) -> LmdbMetadata:
    text = _read_value(tree, METADATA_KEY, MAX_METADATA_BYTES)
    if _read_value(tree, METADATA_CRC_KEY, 8) != b"%08x" % zlib.crc32(text):
        raise LmdbFormatError("is damaged: its metadata do not have the checksum that they were written with")
    try:
        return parse_metadata(text)
    except ValueError as error:
        raise LmdbFormatError(f"has metadata that cannot be used ({error})") from error


def _read_value(tree: LmdbReader, key: bytes, most: int) -> bytes:
    start, length = tree.locate(key)
    if length > most:
        raise LmdbFormatError(f"is damaged: {key.decode()} has {length:,} bytes")
    return tree.read(start, length)


def _build_lmdb_source(tree: LmdbReader, path: Path, split: Split, facts: LmdbMetadata) -> Source:
    split_facts, info = facts.for_split(split), facts.build_info(split)
    labels = _read_labels(tree, split, split_facts, info.num_classes)
    if split_facts.kind == "encoded":
        return LmdbSource(info, str(path), tree, labels, bytes.fromhex(split_facts.digest))
    assert split_facts.image_size is not None, "parse_facts has seen to it"
    images = _read_pixels(tree, split, labels, (*split_facts.image_size, info.channels))
    return ArraySource(info, images, labels.astype(np.int64))


def _read_labels(tree: LmdbReader, split: Split, split_facts: LmdbSplitMetadata, num_classes: int) -> NDArray[np.int32]:
    stored = _read_value(tree, build_labels_key(split), 4 * split_facts.num_images)
    if len(stored) != 4 * split_facts.num_images:
        raise LmdbFormatError(f"has {len(stored) // 4:,} labels for the {split_facts.num_images:,} images of {split}")
    if zlib.crc32(stored) != split_facts.labels_crc32:
        raise LmdbFormatError(f"is damaged: the labels of {split} do not have the checksum that they were written with")
    labels = np.frombuffer(stored, dtype="<i4").astype(np.int32)
    if len(labels) and not 0 <= labels.min() <= labels.max() < num_classes:
        raise LmdbFormatError(f"has labels from {labels.min()} to {labels.max()} for {num_classes:,} classes")
    return labels


def _read_pixels(
    tree: LmdbReader, split: Split, labels: NDArray[np.int32], shape: tuple[int, int, int]
) -> NDArray[np.uint8]:
    """Return uint8 [N, H, W, C]."""
    num_bytes = math.prod(shape)
    if num_bytes * len(labels) > tree.num_bytes:
        raise LmdbFormatError(f"has {tree.num_bytes:,} bytes, and {len(labels):,} images of {num_bytes:,} were written")
    images = np.empty((len(labels), *shape), dtype=np.uint8)
    for index, label in enumerate(labels.tolist()):
        image = _read_image(tree, split, index, label)
        if len(image) != num_bytes:
            raise LmdbFormatError(f"has {len(image):,} bytes of pixels in {split}[{index}], not {num_bytes:,}")
        images[index] = np.frombuffer(image, dtype=np.uint8).reshape(shape)
    return images


def _read_image(tree: LmdbReader, split: Split, index: int, label: int) -> bytes:
    """Return the image of a sample. Raise `LmdbFormatError` if it is damaged or has another label than `label`."""
    start, length = tree.locate(build_sample_key(split, index))
    if length > MAX_SAMPLE_BYTES:
        raise LmdbFormatError(f"has {length:,} bytes in {split}[{index}]")
    try:
        stored_label, image = decode_sample(tree.read(start, length))
    except ValueError as error:
        raise LmdbFormatError(f"{split}[{index}] {error}") from error
    if stored_label != label:
        raise LmdbFormatError(f"{split}[{index}] has the label {stored_label}, and {label} in the list of labels")
    return image
