"""File format of packs, versions 1 and 2: the header of every file and the layout of the index.

`docs/reference/pack.md` describes it byte by byte.
"""

import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, Any, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from paceline.core.dataset import Split, TargetTable
from paceline.core.errors import DataError
from paceline.core.pixels import MAX_CHANNELS, PixelType
from paceline.data.pack.shards import HEADER_BYTES
from paceline.data.pack.targets import decode_targets

# A copy in text mode changes the line end, as in PNG's signature.
MAGIC = b"plpack\r\n"
PACK_VERSION = 1
# Its metadata may have a table of targets, and pixels other than 8-bit ones: keys that readers of version 1 refuse.
EXTENDED_VERSION = 2
# Every section starts at a multiple of this, so that numpy can map its columns without a copy.
ALIGNMENT = 64
KIND_PIXELS, KIND_RECORD, KIND_FILE = 0, 1, 2
SPLITS: tuple[Split, Split] = ("train", "val")
# The index in a folder of shards.
INDEX_NAME = "index.pack"
# Size limit of the JSON: 21,841 classes with names of 380 bytes.
MAX_META_BYTES = 8 << 20
MAX_SHARDS = 1 << 20
# Columns of the index, in file order: 33 bytes per sample.
COLUMNS = {
    "offsets": "<u8",
    "name_ends": "<u8",
    "lengths": "<u4",
    "crc32s": "<u4",
    "labels": "<i4",
    "heights": "<u2",
    "widths": "<u2",
    "kinds": "<u1",
}
SHARD_DTYPE = np.dtype([("num_bytes", "<u8"), ("header_crc32", "<u4"), ("zero", "<u4")])
_HEADER_STRUCT = struct.Struct("<8sHHI16sQQQIIII")
_SIZES_STRUCT = struct.Struct("<QQQQQQ")
_FIX = "pack it again with this version, or restore the file"

_ImageSide = Annotated[int, Field(ge=1, le=65535)]


class FileRole(IntEnum):
    """A file's role: a whole pack, the index of a folder of shards, or a shard."""

    WHOLE = 0
    INDEX = 1
    SHARD = 2


def shard_name(number: int) -> str:
    """Return the file name of shard `number`."""
    return f"data-{number:05d}.pack"


def align_offset(offset: int, alignment: int = ALIGNMENT) -> int:
    """Round `offset` up to a multiple of `alignment`."""
    return -(-offset // alignment) * alignment


@dataclass(frozen=True)
class PackHeader:
    """The first 128 bytes of every file of a pack.

    Data follow, then the index, except in a shard. The index of a folder of shards has no data. All files of a pack
    have the same `pack_id`.
    """

    role: FileRole
    pack_id: bytes
    num_bytes: int
    data_bytes: int
    data_crc32: int
    index_bytes: int = 0
    index_crc32: int = 0
    shard: int = 0
    num_shards: int = 1
    version: int = PACK_VERSION

    @property
    def index_offset(self) -> int:
        """Byte offset of the index in the file."""
        return align_offset(HEADER_BYTES + self.data_bytes)

    def to_bytes(self) -> bytes:
        """Return the 128 bytes."""

        def with_crc(crc32: int) -> bytes:
            fields = (self.num_bytes, self.data_bytes, self.index_bytes, self.index_crc32, self.data_crc32)
            header_bytes = _HEADER_STRUCT.pack(
                MAGIC, self.version, self.role, crc32, self.pack_id, *fields, self.shard, self.num_shards
            )
            return header_bytes.ljust(HEADER_BYTES, b"\0")

        return with_crc(zlib.crc32(with_crc(0)))  # computed with zeros in place of the checksum itself

    @classmethod
    def from_bytes(cls, data: bytes, file_name: str) -> Self:
        """Parse the start of a file. Raise `DataError`, naming `file_name`, if it is not a valid header."""
        if not data.startswith(MAGIC) or len(data) < HEADER_BYTES:
            raise DataError(
                f"{file_name}: is not a pack: it starts with {data[:8]!r} (paceline data pack writes packs)"
            )
        _, version, role, crc32, pack_id, num_bytes, data_bytes, index_bytes, *rest = _HEADER_STRUCT.unpack_from(data)
        if version not in (PACK_VERSION, EXTENDED_VERSION):
            raise DataError(
                f"{file_name}: is a pack of version {version}, and this program reads versions {PACK_VERSION} and "
                f"{EXTENDED_VERSION} (read it with a newer paceline, or pack it again)"
            )
        zeroed = data[:12] + bytes(4) + data[16:HEADER_BYTES]
        index_crc32, data_crc32, shard, num_shards = rest
        # After the version, whose layout may differ; before any field is used.
        if zlib.crc32(zeroed) != crc32 or role not in list(FileRole) or any(data[_HEADER_STRUCT.size : HEADER_BYTES]):
            raise DataError(f"{file_name}: its header is damaged ({_FIX})")
        sizes = (num_bytes, data_bytes, data_crc32, index_bytes, index_crc32)
        header = cls(FileRole(role), pack_id, *sizes, shard, num_shards, version)
        # File offsets are signed 64-bit numbers.
        end = HEADER_BYTES + data_bytes if header.role is FileRole.SHARD else header.index_offset + index_bytes
        if end != num_bytes or end >= 1 << 63 or not 1 <= num_shards <= MAX_SHARDS or shard >= num_shards:
            raise DataError(f"{file_name}: its header is inconsistent ({_FIX})")
        return header


@dataclass(frozen=True)
class IndexColumn:
    """A column of the index, at `offset` bytes from its start."""

    dtype: np.dtype
    offset: int


@dataclass(frozen=True)
class IndexSizes:
    """The first 64 bytes of an index; `samples` and `names_bytes` are (training, validation)."""

    meta_bytes: int
    num_shards: int
    samples: tuple[int, int]
    names_bytes: tuple[int, int]

    def to_bytes(self) -> bytes:
        """Return the 64 bytes."""
        pairs = zip(self.samples, self.names_bytes, strict=True)
        numbers = (self.meta_bytes, self.num_shards, *(number for pair in pairs for number in pair))
        return _SIZES_STRUCT.pack(*numbers).ljust(ALIGNMENT, b"\0")

    @classmethod
    def from_bytes(cls, data: bytes) -> "IndexSizes":
        """Parse the 64 bytes without checks."""
        meta_bytes, num_shards, num_train, train_names, num_val, val_names = _SIZES_STRUCT.unpack_from(data)
        return cls(meta_bytes, num_shards, (num_train, num_val), (train_names, val_names))


@dataclass(frozen=True)
class IndexLayout:
    """Byte offsets of the sections of an index; `columns` and `names` are (training, validation).

    `gaps` are (start, stop) of the zero bytes between sections.
    """

    meta: int
    shards: int
    columns: tuple[dict[str, IndexColumn], dict[str, IndexColumn]]
    names: tuple[int, int]
    num_bytes: int
    gaps: tuple[tuple[int, int], ...]

    @classmethod
    def from_sizes(cls, sizes: IndexSizes) -> "IndexLayout":
        """Compute the layout."""
        gaps = [(_SIZES_STRUCT.size, ALIGNMENT)]

        def start_after(end: int) -> int:
            gaps.append((end, align_offset(end)))
            return align_offset(end)

        meta = ALIGNMENT
        shards = start_after(meta + sizes.meta_bytes)
        offset = start_after(shards + sizes.num_shards * SHARD_DTYPE.itemsize)
        columns: list[dict[str, IndexColumn]] = []
        names = []
        for num_samples, names_bytes in zip(sizes.samples, sizes.names_bytes, strict=True):
            columns.append({})
            for name, code in COLUMNS.items():
                columns[-1][name] = IndexColumn(np.dtype(code), offset)
                offset = start_after(offset + num_samples * np.dtype(code).itemsize)
            names.append(offset)
            offset = start_after(offset + names_bytes)
        return cls(meta, shards, (columns[0], columns[1]), (names[0], names[1]), offset, tuple(gaps))


class _FrozenModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class SplitMeta(_FrozenModel):
    """Metadata of a split (`core.dataset.DatasetInfo`) and the digest of its samples (`sources.fingerprint`)."""

    name: str
    mean: tuple[float, ...]
    std: tuple[Annotated[float, Field(gt=0)], ...]
    notes: tuple[str, ...] = ()
    image_size: tuple[_ImageSide, _ImageSide] | None = None
    digest: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    targets: str | None = None  # `targets.encode_targets`


class ProcessingMeta(_FrozenModel):
    """Image processing; `resize` and `quality` are None if no image was changed.

    `every` is the number of MCUs (JPEG's minimum coded units) between seek points of a record.
    """

    resize: int | None = None
    quality: int | None = None
    every: int


class PackMeta(_FrozenModel):
    """The JSON of an index."""

    class_names: Annotated[tuple[str, ...], Field(min_length=1)]
    channels: Annotated[int, Field(ge=1, le=MAX_CHANNELS)]
    pixels: PixelType = "uint8"
    made: ProcessingMeta
    train: SplitMeta
    val: SplitMeta

    @model_validator(mode="after")
    def _check_channels(self) -> Self:
        for split in (self.train, self.val):
            if len(split.mean) != self.channels or len(split.std) != self.channels:
                raise ValueError(f"mean and std are not of {self.channels} channels")
            if split.targets is not None:
                decode_targets(split.targets, len(self.class_names))
        return self

    def decode_targets(self, split: Split) -> TargetTable | None:
        """Return the table of targets of a split, or None if a label is a class."""
        text = self.train.targets if split == "train" else self.val.targets
        return None if text is None else decode_targets(text, len(self.class_names))

    @property
    def version(self) -> int:
        """Version of the format that can hold it."""
        has_targets = self.train.targets is not None or self.val.targets is not None
        return EXTENDED_VERSION if has_targets or self.pixels != "uint8" else PACK_VERSION

    def to_json(self) -> bytes:
        """Return deterministic JSON."""
        # The JSON of version 1 has none of these keys.
        left_out: dict[str, Any] = {"pixels": True, "train": {"targets"}, "val": {"targets"}}
        return self.model_dump_json(exclude=left_out if self.version == PACK_VERSION else None).encode()

    @classmethod
    def from_json(cls, data: bytes, file_name: str) -> "PackMeta":
        """Parse the JSON. Raise `DataError`, naming `file_name`, if it is invalid."""
        try:
            return cls.model_validate_json(data)
        except ValueError as error:
            raise DataError(f"{file_name}: the metadata in its index is damaged ({_FIX})") from error
