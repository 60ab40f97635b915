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
    FACTS_CRC_KEY,
    FACTS_KEY,
    MAX_FACTS_BYTES,
    TAIL,
    Facts,
    SplitFacts,
    labels_key,
    name_in,
    parse_facts,
    sample_key,
    unpack_sample,
)
from paceline.data.sources.lmdb_pages import DamageError, Tree
from paceline.data.sources.open_files import MAX_SAMPLE_BYTES
from paceline.data.sources.places import expanded, is_file, printable
from paceline.recipe.schema.source import Lmdb

REMEDY = "copy it again, or write it again with paceline data pack --format lmdb"
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
    tree: Tree
    labels: NDArray[np.int32]
    digest: bytes

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> Sample:
        """Return (image file bytes, label). Raise `ImageError` for a damaged sample."""
        label = int(self.labels[index])
        try:
            return _image(self.tree, self.info.split, index, label), label
        except ValueError as error:
            raise ImageError(self._place(index), f"is damaged: {error}", REMEDY) from error

    def name_of(self, index: int) -> str:
        """Return the name that the sample had in its original source, or its key here if that cannot be read."""
        try:
            start, length = self.tree.locate(sample_key(self.info.split, index))
            name_bytes, _ = TAIL.unpack(self.tree.read(start + length - TAIL.size, TAIL.size))
            num_bytes = min(length, TAIL.size + name_bytes)
            return name_in(self.tree.read(start + length - num_bytes, num_bytes)) or self._place(index)
        except ValueError:
            return self._place(index)

    def _place(self, index: int) -> str:
        return f"{printable(self.path)}[{sample_key(self.info.split, index).decode()}]"


def load_lmdb(section: Lmdb) -> Datasets:
    """Load the two splits of an LMDB: encoded images on access, pixels of one size (CIFAR) into memory.

    Raise `DataError` for a missing, foreign, truncated or damaged file.
    """
    root = expanded(section.root)
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
        tree = Tree(path)
        facts = _facts(tree)
        expected = 4 + facts.train.num_images + facts.val.num_images
        if tree.num_entries != expected:
            raise DamageError(f"has {tree.num_entries:,} entries, and {expected:,} were written")
        train, val = (_source(tree, path, split, facts) for split in _SPLITS)
    except DamageError as error:
        raise DataError(f"{printable(path)}: {error}; {REMEDY}") from error
    return Datasets(train, val)


def _facts(tree: Tree) -> Facts:
    text = _value(tree, FACTS_KEY, MAX_FACTS_BYTES)
    if _value(tree, FACTS_CRC_KEY, 8) != b"%08x" % zlib.crc32(text):
        raise DamageError("is damaged: its metadata do not have the checksum that they were written with")
    try:
        return parse_facts(text)
    except ValueError as error:
        raise DamageError(f"has metadata that cannot be used ({error})") from error


def _value(tree: Tree, key: bytes, most: int) -> bytes:
    start, length = tree.locate(key)
    if length > most:
        raise DamageError(f"is damaged: {key.decode()} has {length:,} bytes")
    return tree.read(start, length)


def _source(tree: Tree, path: Path, split: Split, facts: Facts) -> Source:
    split_facts, info = facts.of(split), facts.info(split)
    labels = _labels(tree, split, split_facts, info.num_classes)
    if split_facts.kind == "encoded":
        return LmdbSource(info, str(path), tree, labels, bytes.fromhex(split_facts.digest))
    assert split_facts.image_size is not None, "parse_facts has seen to it"
    images = _pixels(tree, split, labels, (*split_facts.image_size, info.channels))
    return ArraySource(info, images, labels.astype(np.int64))


def _labels(tree: Tree, split: Split, split_facts: SplitFacts, num_classes: int) -> NDArray[np.int32]:
    stored = _value(tree, labels_key(split), 4 * split_facts.num_images)
    if len(stored) != 4 * split_facts.num_images:
        raise DamageError(f"has {len(stored) // 4:,} labels for the {split_facts.num_images:,} images of {split}")
    if zlib.crc32(stored) != split_facts.labels_crc32:
        raise DamageError(f"is damaged: the labels of {split} do not have the checksum that they were written with")
    labels = np.frombuffer(stored, dtype="<i4").astype(np.int32)
    if len(labels) and not 0 <= labels.min() <= labels.max() < num_classes:
        raise DamageError(f"has labels from {labels.min()} to {labels.max()} for {num_classes:,} classes")
    return labels


def _pixels(tree: Tree, split: Split, labels: NDArray[np.int32], shape: tuple[int, int, int]) -> NDArray[np.uint8]:
    """Return uint8 [N, H, W, C]."""
    num_bytes = math.prod(shape)
    if num_bytes * len(labels) > tree.num_bytes:
        raise DamageError(f"has {tree.num_bytes:,} bytes, and {len(labels):,} images of {num_bytes:,} were written")
    images = np.empty((len(labels), *shape), dtype=np.uint8)
    for index, label in enumerate(labels.tolist()):
        image = _image(tree, split, index, label)
        if len(image) != num_bytes:
            raise DamageError(f"has {len(image):,} bytes of pixels in {split}[{index}], not {num_bytes:,}")
        images[index] = np.frombuffer(image, dtype=np.uint8).reshape(shape)
    return images


def _image(tree: Tree, split: Split, index: int, label: int) -> bytes:
    """Return the image of a sample. Raise `DamageError` if it is damaged or has another label than `label`."""
    start, length = tree.locate(sample_key(split, index))
    if length > MAX_SAMPLE_BYTES:
        raise DamageError(f"has {length:,} bytes in {split}[{index}]")
    try:
        stored_label, image = unpack_sample(tree.read(start, length))
    except ValueError as error:
        raise DamageError(f"{split}[{index}] {error}") from error
    if stored_label != label:
        raise DamageError(f"{split}[{index}] has the label {stored_label}, and {label} in the list of labels")
    return image
