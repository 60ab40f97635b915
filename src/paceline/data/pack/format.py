"""The file format of packs, version 1: the header of every file, and where the columns of the index lie.

docs/reference/pack.md tells the same byte by byte. All numbers are little-endian; every part begins at a multiple of
64 bytes, so that numpy maps the columns as they are. Nothing here opens a file.
"""

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

MAGIC = b"plpack\r\n"
"""The line end shows a copy that was made as text, as PNG's does."""
VERSION = 1
ALIGNMENT = 64
KIND_PIXELS, KIND_RECORD, KIND_FILE = 0, 1, 2
SPLITS: tuple[Split, Split] = ("train", "val")
INDEX_NAME = "index.pack"
"""The index in a folder of shards."""
MAX_META_BYTES = 8 << 20
"""Of the JSON: room for 21,841 classes with 380 bytes of name each."""
MAX_SHARDS = 1 << 20
_HEADER = struct.Struct("<8sHHI16sQQQIIII")
_HEAD = struct.Struct("<QQQQQQ")
_FIX = "pack it again with this version, or restore the file"


class Role(IntEnum):
    """What a file of a pack is: all of it, the index of a folder of shards, or one of these."""

    WHOLE = 0
    INDEX = 1
    SHARD = 2


def shard_name(number: int) -> str:
    """Return the file name of shard `number` in a folder of shards."""
    return f"data-{number:05d}.pack"


def aligned(offset: int, alignment: int = ALIGNMENT) -> int:
    """Return the first multiple of `alignment` that is not below `offset`."""
    return -(-offset // alignment) * alignment


@dataclass(frozen=True)
class Header:
    """The first 128 bytes of a file of a pack.

    `data_bytes` follow them, with CRC-32 `data_crc32`; then, at the next multiple of 64, the index. A shard has no
    index, and the index of a folder of shards no data. `pack_id` is the same in all files of a pack.
    """

    role: Role
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
        """Where the index begins."""
        return aligned(HEADER_BYTES + self.data_bytes)

    def packed(self) -> bytes:
        """Return the 128 bytes."""

        def with_crc(crc32: int) -> bytes:
            fields = (self.num_bytes, self.data_bytes, self.index_bytes, self.index_crc32, self.data_crc32)
            head = _HEADER.pack(MAGIC, VERSION, self.role, crc32, self.pack_id, *fields, self.shard, self.num_shards)
            return head.ljust(HEADER_BYTES, b"\0")

        return with_crc(zlib.crc32(with_crc(0)))

    @classmethod
    def parsed(cls, data: bytes, place: str) -> Self:
        """Return the header that a file begins with; `place` is what messages call the file.

        Raise `DataError` for one that is no pack, of a later version, damaged or in contradiction with itself.
        """
        if not data.startswith(MAGIC) or len(data) < HEADER_BYTES:
            raise DataError(f"{place}: is not a pack: it starts with {data[:8]!r} (paceline data pack writes packs)")
        _, version, role, crc32, pack_id, num_bytes, data_bytes, index_bytes, *rest = _HEADER.unpack_from(data)
        if version != VERSION:
            raise DataError(
                f"{place}: is a pack of version {version}, and this program reads version {VERSION} "
                f"(read it with a newer paceline, or pack it again)"
            )
        head = data[:12] + bytes(4) + data[16:HEADER_BYTES]
        index_crc32, data_crc32, shard, num_shards = rest
        if zlib.crc32(head) != crc32 or role not in list(Role) or any(data[_HEADER.size : HEADER_BYTES]):
            raise DataError(f"{place}: its header is damaged ({_FIX})")
        header = cls(
            Role(role), pack_id, num_bytes, data_bytes, data_crc32, index_bytes, index_crc32, shard, num_shards
        )
        end = HEADER_BYTES + data_bytes if header.role is Role.SHARD else header.index_offset + index_bytes
        if end != num_bytes or end >= 1 << 63 or not 1 <= num_shards <= MAX_SHARDS or shard >= num_shards:
            raise DataError(f"{place}: its header contradicts itself ({_FIX})")
        return header


@dataclass(frozen=True)
class Column:
    """A column of the index: its numpy type, and where it begins, counted from the start of the index."""

    dtype: np.dtype
    offset: int


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
"""What the index says of each sample, in the order in which the columns lie in it."""
SHARD_DTYPE = np.dtype([("num_bytes", "<u8"), ("header_crc32", "<u4"), ("zero", "<u4")])


@dataclass(frozen=True)
class Sizes:
    """The numbers that an index begins with; they decide where everything in it lies.

    `samples` and `names_bytes` are of training and validation.
    """

    meta_bytes: int
    num_shards: int
    samples: tuple[int, int]
    names_bytes: tuple[int, int]

    def packed(self) -> bytes:
        """Return the 64 bytes."""
        pairs = zip(self.samples, self.names_bytes, strict=True)
        numbers = (self.meta_bytes, self.num_shards, *(number for pair in pairs for number in pair))
        return _HEAD.pack(*numbers).ljust(ALIGNMENT, b"\0")

    @classmethod
    def parsed(cls, data: bytes) -> "Sizes":
        """Return the numbers in the first 64 bytes of an index, whatever they are."""
        meta_bytes, num_shards, num_train, train_names, num_val, val_names = _HEAD.unpack_from(data)
        return cls(meta_bytes, num_shards, (num_train, num_val), (train_names, val_names))


@dataclass(frozen=True)
class Layout:
    """Where the parts of an index lie, counted from its start; `columns` and `names` are of training and validation.

    `gaps` are the (start, stop) of the zeros between them.
    """

    meta: int
    shards: int
    columns: tuple[dict[str, Column], dict[str, Column]]
    names: tuple[int, int]
    num_bytes: int
    gaps: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, sizes: Sizes) -> "Layout":
        """Return the only layout that an index of these sizes has."""
        gaps = [(_HEAD.size, ALIGNMENT)]

        def after(end: int) -> int:
            gaps.append((end, aligned(end)))
            return aligned(end)

        meta = ALIGNMENT
        shards = after(meta + sizes.meta_bytes)
        at = after(shards + sizes.num_shards * SHARD_DTYPE.itemsize)
        columns: list[dict[str, Column]] = []
        names = []
        for num_samples, names_bytes in zip(sizes.samples, sizes.names_bytes, strict=True):
            columns.append({})
            for name, code in COLUMNS.items():
                columns[-1][name] = Column(np.dtype(code), at)
                at = after(at + num_samples * np.dtype(code).itemsize)
            names.append(at)
            at = after(at + names_bytes)
        return cls(meta, shards, (columns[0], columns[1]), (names[0], names[1]), at, tuple(gaps))


class _Words(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


_Side = Annotated[int, Field(ge=1, le=65535)]


class SplitMeta(_Words):
    """What a split says of itself (`core.dataset.DatasetInfo`), and the digest of its samples (`data.identity`)."""

    name: str
    mean: tuple[float, ...]
    std: tuple[Annotated[float, Field(gt=0)], ...]
    notes: tuple[str, ...] = ()
    image_size: tuple[_Side, _Side] | None = None
    digest: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class Made(_Words):
    """What was done to the images: `resize` and `quality` are None where none was changed.

    `every` is the MCUs between seek points of a record.
    """

    resize: int | None = None
    quality: int | None = None
    every: int


class Meta(_Words):
    """The JSON of an index."""

    class_names: Annotated[tuple[str, ...], Field(min_length=1)]
    channels: Literal[1, 3]
    made: Made
    train: SplitMeta
    val: SplitMeta

    @model_validator(mode="after")
    def _fits_channels(self) -> Self:
        for split in (self.train, self.val):
            if len(split.mean) != self.channels or len(split.std) != self.channels:
                raise ValueError(f"mean and std are not of {self.channels} channels")
        return self

    def packed(self) -> bytes:
        """Return the JSON, the same bytes for the same words."""
        return self.model_dump_json().encode()

    @classmethod
    def parsed(cls, data: bytes, place: str) -> "Meta":
        """Return what the JSON says. Raise `DataError`, calling the file `place`, for anything else."""
        try:
            return cls.model_validate_json(data)
        except ValueError as error:
            raise DataError(f"{place}: what its index says of the data set is damaged ({_FIX})") from error
