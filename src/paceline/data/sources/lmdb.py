"""Load a dataset from an LMDB that paceline has written."""

import math
import re
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from paceline.core.dataset import ArraySource, DatasetInfo, Datasets, Sample, Source, Split
from paceline.core.errors import DataError
from paceline.data.bad_images import ImageError
from paceline.data.files import MAX_SAMPLE_BYTES, expand_path, is_file, printable
from paceline.data.sources.lmdb_pages import LmdbFormatError, LmdbReader
from paceline.recipe.schema.source import Lmdb

#   Key                    Value
#
#   __paceline__           `LmdbMetadata` as JSON
#   __paceline__/crc32     CRC-32 of that JSON, 8 hexadecimal digits
#   labels/SPLIT           int32, little-endian, one per sample of `train` or `val`
#   SPLIT/0000000012       sample 12: int32 label, the image, its name in UTF-8, uint16 bytes of the name, uint32 CRC-32
#                          of all before it; little-endian
#
# The image is an encoded file, or uint8 pixels [H, W, C] in row-major order. A reader that takes everything after the
# first four bytes for an image file works too, as decoders stop at the end of the image.
LAYOUT_VERSION: Literal[1] = 1
METADATA_KEY = b"__paceline__"
METADATA_CRC_KEY = b"__paceline__/crc32"
SAMPLE_TAIL = struct.Struct("<HI")
SAMPLE_LABEL = struct.Struct("<i")
MAX_METADATA_BYTES = 2**28
LMDB_FIX = "copy it again, or write it again with paceline data pack --format lmdb"
_SPLITS: tuple[Split, Split] = ("train", "val")
_MAX_NAME_BYTES = 2**16 - 1

NonEmptyText = Annotated[str, Field(min_length=1)]
HexDigest = Annotated[str, Field(pattern=re.compile(r"^[0-9a-f]{64}$"))]
ImageSide = Annotated[int, Field(ge=1, le=65535)]
ChannelStatistic = Annotated[float, Field(allow_inf_nan=False)]


class _StrictModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class LmdbSplitMetadata(_StrictModel):
    """Metadata of one split."""

    name: NonEmptyText
    num_images: int = Field(ge=0, lt=10**10)
    image_size: tuple[ImageSide, ImageSide] | None
    mean: tuple[ChannelStatistic, ...]
    std: tuple[Annotated[ChannelStatistic, Field(gt=0)], ...]
    notes: tuple[str, ...]
    kind: Literal["encoded", "pixels"]
    digest: HexDigest
    labels_crc32: int = Field(ge=0, lt=2**32)


class LmdbMetadata(_StrictModel):
    """Metadata of both splits."""

    version: Literal[1]
    class_names: tuple[NonEmptyText, ...] = Field(min_length=1)
    channels: Literal[1, 3]
    train: LmdbSplitMetadata
    val: LmdbSplitMetadata

    @model_validator(mode="after")
    def _check_splits(self) -> "LmdbMetadata":
        for split in (self.train, self.val):
            if not len(split.mean) == len(split.std) == self.channels:
                raise ValueError("mean and std are not one for each channel")
            if split.kind == "pixels" and split.image_size is None:
                raise ValueError("pixels have no image_size")
        return self

    def for_split(self, split: Split) -> LmdbSplitMetadata:
        """Return the metadata of a split."""
        return self.train if split == "train" else self.val

    def build_info(self, split: Split) -> DatasetInfo:
        """Build the `DatasetInfo` of a split."""
        split_metadata = self.for_split(split)
        return DatasetInfo(
            name=printable(split_metadata.name),
            split=split,
            num_images=split_metadata.num_images,
            class_names=tuple(map(printable, self.class_names)),
            channels=self.channels,
            image_size=split_metadata.image_size,
            mean=split_metadata.mean,
            std=split_metadata.std,
            notes=tuple(map(printable, split_metadata.notes)),
        )


def parse_metadata(text: bytes) -> LmdbMetadata:
    """Parse the JSON metadata. Raise `ValueError` with a reason of one line if it is invalid."""
    try:
        return LmdbMetadata.model_validate_json(text)
    except ValidationError as error:
        raise ValueError(describe_invalid_metadata(error)) from error


def describe_invalid_metadata(error: ValidationError) -> str:
    """Return the first field that is invalid and why, in one line."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    field = ".".join(map(str, first["loc"]))
    return printable(f"{field}: {first['msg']}" if field else first["msg"])[:200]


def build_labels_key(split: Split) -> bytes:
    """Return the key of a split's labels."""
    return f"labels/{split}".encode()


def build_sample_key(split: Split, index: int) -> bytes:
    """Return the key of a sample."""
    return f"{split}/{index:010d}".encode()


def encode_sample(label: int, image: bytes, name: str) -> bytes:
    """Encode the value of a sample; a name of more than 65,535 bytes is truncated."""
    text = name.encode("utf-8", "replace")[:_MAX_NAME_BYTES]
    body = b"".join((SAMPLE_LABEL.pack(label), image, text, struct.pack("<H", len(text))))
    return body + struct.pack("<I", zlib.crc32(body))


def decode_sample(value: bytes) -> tuple[int, bytes]:
    """Return (label, image). Raise `ValueError` if the checksum does not match."""
    if len(value) < SAMPLE_LABEL.size + SAMPLE_TAIL.size:
        raise ValueError("is truncated")
    name_bytes, crc = SAMPLE_TAIL.unpack_from(value, len(value) - SAMPLE_TAIL.size)
    end = len(value) - SAMPLE_TAIL.size - name_bytes
    if end < SAMPLE_LABEL.size or zlib.crc32(memoryview(value)[:-4]) != crc:
        raise ValueError("does not have the checksum that it was written with")
    return SAMPLE_LABEL.unpack_from(value)[0], value[SAMPLE_LABEL.size : end]


def read_sample_name(tail: bytes) -> str:
    """Return the sample's name at the end of a value; `tail` is the value or its last bytes."""
    name_bytes, _ = SAMPLE_TAIL.unpack_from(tail, len(tail) - SAMPLE_TAIL.size)
    end = len(tail) - SAMPLE_TAIL.size
    return printable(tail[max(0, end - name_bytes) : end].decode("utf-8", "replace"))


# `lmdb_pages` reads the file, not the LMDB library, which can open it only once per process and crashes where it cannot
# be read. Damaged files raise `DataError`. A CRC-32 per sample detects damage but not manipulation. Opening reads a few
# pages; memory holds 4 bytes per label.
@dataclass(frozen=True, eq=False)
class LmdbSource:
    """The encoded images of a split in the file at `path`."""

    info: DatasetInfo
    path: str
    reader: LmdbReader
    labels: NDArray[np.int32]  # [N]
    digest: bytes  # `fingerprint.digest_split` of the split that was written

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
        """Return the name in the original source, or `path[key]` if it cannot be read."""
        # Only the end of the value is read, as the image may be large.
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
    """Open the LMDB of `section`. Raise `DataError` for a missing, foreign, truncated or damaged file."""
    root = expand_path(section.root)
    path = root / "data.mdb"
    if not is_file(path):
        raise DataError(
            f"data.source.root: {printable(root)} has no data.mdb (set it to the folder that paceline data pack "
            f"--format lmdb has written)"
        )
    return open_lmdb(path.absolute())


def open_lmdb(path: Path) -> Datasets:
    """Open the two splits in the file at `path`; pixels of one size are read into memory. Raise as `load_lmdb`."""
    try:
        reader = LmdbReader(path)
        metadata = _read_metadata(reader)
        expected = 4 + metadata.train.num_images + metadata.val.num_images
        if reader.num_entries != expected:
            raise LmdbFormatError(f"has {reader.num_entries:,} entries, and {expected:,} were written")
        train, val = (_build_lmdb_source(reader, path, split, metadata) for split in _SPLITS)
    except LmdbFormatError as error:
        raise DataError(f"{printable(path)}: {error}; {LMDB_FIX}") from error
    return Datasets(train, val)


def _read_metadata(reader: LmdbReader) -> LmdbMetadata:
    text = _read_value(reader, METADATA_KEY, MAX_METADATA_BYTES)
    if _read_value(reader, METADATA_CRC_KEY, 8) != b"%08x" % zlib.crc32(text):
        raise LmdbFormatError("is damaged: its metadata do not have the checksum that they were written with")
    try:
        return parse_metadata(text)
    except ValueError as error:
        raise LmdbFormatError(f"has metadata that cannot be used ({error})") from error


def _read_value(reader: LmdbReader, key: bytes, max_bytes: int) -> bytes:
    start, length = reader.locate(key)
    if length > max_bytes:
        raise LmdbFormatError(f"is damaged: {key.decode()} has {length:,} bytes")
    return reader.read(start, length)


def _build_lmdb_source(reader: LmdbReader, path: Path, split: Split, metadata: LmdbMetadata) -> Source:
    split_metadata, info = metadata.for_split(split), metadata.build_info(split)
    labels = _read_labels(reader, split, split_metadata, info.num_classes)
    if split_metadata.kind == "encoded":
        return LmdbSource(info, str(path), reader, labels, bytes.fromhex(split_metadata.digest))
    assert split_metadata.image_size is not None, "`LmdbMetadata` requires it"
    images = _read_pixels(reader, split, labels, (*split_metadata.image_size, info.channels))
    return ArraySource(info, images, labels.astype(np.int64))


def _read_labels(
    reader: LmdbReader, split: Split, split_metadata: LmdbSplitMetadata, num_classes: int
) -> NDArray[np.int32]:
    stored = _read_value(reader, build_labels_key(split), 4 * split_metadata.num_images)
    if len(stored) != 4 * split_metadata.num_images:
        raise LmdbFormatError(
            f"has {len(stored) // 4:,} labels for the {split_metadata.num_images:,} images of {split}"
        )
    if zlib.crc32(stored) != split_metadata.labels_crc32:
        raise LmdbFormatError(f"is damaged: the labels of {split} do not have the checksum that they were written with")
    labels = np.frombuffer(stored, dtype="<i4").astype(np.int32)
    if len(labels) and not 0 <= labels.min() <= labels.max() < num_classes:
        raise LmdbFormatError(f"has labels from {labels.min()} to {labels.max()} for {num_classes:,} classes")
    return labels


def _read_pixels(
    reader: LmdbReader, split: Split, labels: NDArray[np.int32], shape: tuple[int, int, int]
) -> NDArray[np.uint8]:
    num_bytes = math.prod(shape)
    # Before memory for all images is allocated.
    if num_bytes * len(labels) > reader.num_bytes:
        raise LmdbFormatError(
            f"has {reader.num_bytes:,} bytes, and {len(labels):,} images of {num_bytes:,} were written"
        )
    images = np.empty((len(labels), *shape), dtype=np.uint8)
    for index, label in enumerate(labels.tolist()):
        image = _read_image(reader, split, index, label)
        if len(image) != num_bytes:
            raise LmdbFormatError(f"has {len(image):,} bytes of pixels in {split}[{index}], not {num_bytes:,}")
        images[index] = np.frombuffer(image, dtype=np.uint8).reshape(shape)
    return images


def _read_image(reader: LmdbReader, split: Split, index: int, label: int) -> bytes:
    # The label, which comes from the list of all labels, must be that of the sample.
    start, length = reader.locate(build_sample_key(split, index))
    if length > MAX_SAMPLE_BYTES:
        raise LmdbFormatError(f"has {length:,} bytes in {split}[{index}]")
    try:
        stored_label, image = decode_sample(reader.read(start, length))
    except ValueError as error:
        raise LmdbFormatError(f"{split}[{index}] {error}") from error
    if stored_label != label:
        raise LmdbFormatError(f"{split}[{index}] has the label {stored_label}, and {label} in the list of labels")
    return image
