"""File format of packs, version 1: the header of every file and the layout of the index."""

import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from paceline.core.dataset import Split
from paceline.core.errors import DataError
from paceline.data.pack.shards import HEADER_BYTES

# docs/reference/pack.md describes the format byte by byte. Numbers are little-endian. Every section starts at a
# multiple of 64 bytes, so that numpy can map the columns.
#
# The line end reveals a copy in text mode, as in PNG.
MAGIC = b"plpack\r\n"
PACK_VERSION = 1
ALIGNMENT = 64
KIND_PIXELS, KIND_RECORD, KIND_FILE = 0, 1, 2
SPLITS: tuple[Split, Split] = ("train", "val")
# The index in a folder of shards.
INDEX_NAME = "index.pack"
# Size limit of the JSON: 21,841 classes with names of 380 bytes.
MAX_META_BYTES = 8 << 20
MAX_SHARDS = 1 << 20
_HEADER_STRUCT = struct.Struct("<8sHHI16sQQQIIII")
_SIZES_STRUCT = struct.Struct("<QQQQQQ")
_FIX = "pack it again with this version, or restore the file"


class FileRole(IntEnum):
    """Role of a file: a whole pack, the index of a folder of shards, or a shard."""

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

    `data_bytes` of data with CRC-32 `data_crc32` follow, then, at the next multiple of 64, the index. A shard has no
    index, the index of a folder of shards no data. `pack_id` is the same in all files of a pack.
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

    @property
    def index_offset(self) -> int:
        """Offset of the index in the file."""
        return align_offset(HEADER_BYTES + self.data_bytes)

    def to_bytes(self) -> bytes:
        """Return the 128 bytes."""

        def with_crc(crc32: int) -> bytes:
            fields = (self.num_bytes, self.data_bytes, self.index_bytes, self.index_crc32, self.data_crc32)
            header_bytes = _HEADER_STRUCT.pack(
                MAGIC, PACK_VERSION, self.role, crc32, self.pack_id, *fields, self.shard, self.num_shards
            )
            return header_bytes.ljust(HEADER_BYTES, b"\0")

        return with_crc(zlib.crc32(with_crc(0)))

    @classmethod
    def from_bytes(cls, data: bytes, file_name: str) -> Self:
        """Parse the start of a file; `file_name` is for messages.

        Raise `DataError` if it is not a pack, has a later version, is damaged or inconsistent.
        """
        if not data.startswith(MAGIC) or len(data) < HEADER_BYTES:
            raise DataError(
                f"{file_name}: is not a pack: it starts with {data[:8]!r} (paceline data pack writes packs)"
            )
        _, version, role, crc32, pack_id, num_bytes, data_bytes, index_bytes, *rest = _HEADER_STRUCT.unpack_from(data)
        if version != PACK_VERSION:
            raise DataError(
                f"{file_name}: is a pack of version {version}, and this program reads version {PACK_VERSION} "
                f"(read it with a newer paceline, or pack it again)"
            )
        head = data[:12] + bytes(4) + data[16:HEADER_BYTES]
        index_crc32, data_crc32, shard, num_shards = rest
        if zlib.crc32(head) != crc32 or role not in list(FileRole) or any(data[_HEADER_STRUCT.size : HEADER_BYTES]):
            raise DataError(f"{file_name}: its header is damaged ({_FIX})")
        header = cls(
            FileRole(role), pack_id, num_bytes, data_bytes, data_crc32, index_bytes, index_crc32, shard, num_shards
        )
        end = HEADER_BYTES + data_bytes if header.role is FileRole.SHARD else header.index_offset + index_bytes
        if end != num_bytes or end >= 1 << 63 or not 1 <= num_shards <= MAX_SHARDS or shard >= num_shards:
            raise DataError(f"{file_name}: its header is inconsistent ({_FIX})")
        return header


@dataclass(frozen=True)
class IndexColumn:
    """A column of the index: numpy type, and offset from the start of the index."""

    dtype: np.dtype
    offset: int


# Columns of the index, in file order.
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


@dataclass(frozen=True)
class IndexSizes:
    """The numbers at the start of an index, which determine its layout.

    `samples` and `names_bytes` are (training, validation).
    """

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
        """Parse the first 64 bytes of an index without checks."""
        meta_bytes, num_shards, num_train, train_names, num_val, val_names = _SIZES_STRUCT.unpack_from(data)
        return cls(meta_bytes, num_shards, (num_train, num_val), (train_names, val_names))


@dataclass(frozen=True)
class IndexLayout:
    """Offsets of the sections of an index from its start; `columns` and `names` are (training, validation).

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
        """Compute the layout for the given sizes."""
        gaps = [(_SIZES_STRUCT.size, ALIGNMENT)]

        def after(end: int) -> int:
            gaps.append((end, align_offset(end)))
            return align_offset(end)

        meta = ALIGNMENT
        shards = after(meta + sizes.meta_bytes)
        at = after(shards + sizes.num_shards * SHARD_DTYPE.itemsize)
        columns: list[dict[str, IndexColumn]] = []
        names = []
        for num_samples, names_bytes in zip(sizes.samples, sizes.names_bytes, strict=True):
            columns.append({})
            for name, code in COLUMNS.items():
                columns[-1][name] = IndexColumn(np.dtype(code), at)
                at = after(at + num_samples * np.dtype(code).itemsize)
            names.append(at)
            at = after(at + names_bytes)
        return cls(meta, shards, (columns[0], columns[1]), (names[0], names[1]), at, tuple(gaps))


class _FrozenModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


_ImageSide = Annotated[int, Field(ge=1, le=65535)]


class SplitMeta(_FrozenModel):
    """Metadata of a split (`core.dataset.DatasetInfo`) and the digest of its samples (`sources.fingerprint`)."""

    name: str
    mean: tuple[float, ...]
    std: tuple[Annotated[float, Field(gt=0)], ...]
    notes: tuple[str, ...] = ()
    image_size: tuple[_ImageSide, _ImageSide] | None = None
    digest: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class ProcessingMeta(_FrozenModel):
    """Processing of the images: `resize` and `quality` are None if no image was changed.

    `every` is the number of MCUs between seek points of a record.
    """

    resize: int | None = None
    quality: int | None = None
    every: int


class PackMeta(_FrozenModel):
    """The JSON of an index."""

    class_names: Annotated[tuple[str, ...], Field(min_length=1)]
    channels: Literal[1, 3]
    made: ProcessingMeta
    train: SplitMeta
    val: SplitMeta

    @model_validator(mode="after")
    def _check_channels(self) -> Self:
        for split in (self.train, self.val):
            if len(split.mean) != self.channels or len(split.std) != self.channels:
                raise ValueError(f"mean and std are not of {self.channels} channels")
        return self

    def to_json(self) -> bytes:
        """Return the JSON, deterministically."""
        return self.model_dump_json().encode()

    @classmethod
    def from_json(cls, data: bytes, file_name: str) -> "PackMeta":
        """Parse the JSON. Raise `DataError`, naming `file_name`, if it is invalid."""
        try:
            return cls.model_validate_json(data)
        except ValueError as error:
            raise DataError(f"{file_name}: the metadata in its index is damaged ({_FIX})") from error
