"""The index of a pack: mapped, proved by its checksum, and each of its numbers looked at before it is believed.

Ten million samples are opened in less than a second and cost no memory but the kernel's cache of the file. Where the
bytes of samples come from is `shards`.
"""

import errno
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.dataset import Split
from paceline.core.errors import DataError
from paceline.core.units import count
from paceline.data.pack.format import (
    ALIGNMENT,
    COLUMNS,
    INDEX_NAME,
    KIND_FILE,
    KIND_PIXELS,
    KIND_RECORD,
    MAX_META_BYTES,
    MAX_SHARDS,
    SHARD_DTYPE,
    SPLITS,
    Header,
    Layout,
    Meta,
    Role,
    Sizes,
    shard_name,
)
from paceline.data.pack.shards import HEADER_BYTES, ShardFile, mapped, unreadable
from paceline.data.sources.places import printable

_ROWS_AT_ONCE = 1 << 18
_FIX = "pack it again, or copy it again from where it is whole"


@dataclass(frozen=True, eq=False)
class Columns:
    """What the index says of the N samples of a split: read-only maps, one number a sample.

    `offsets` uint64 count the bytes of all shards' data in a row; `name_ends` uint64 index `names`; `lengths` and
    `crc32s` uint32 are of the stored bytes; `labels` int32; `heights` and `widths` uint16 are upright, and 0 where they
    are unknown or do not fit; `kinds` uint8. Without names `names` is empty.
    """

    offsets: NDArray[np.uint64]
    name_ends: NDArray[np.uint64]
    lengths: NDArray[np.uint32]
    crc32s: NDArray[np.uint32]
    labels: NDArray[np.int32]
    heights: NDArray[np.uint16]
    widths: NDArray[np.uint16]
    kinds: NDArray[np.uint8]
    names: memoryview

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, eq=False)
class Index:
    """An open index. `files` are its shards, whose data begin at the `starts`, uint64 [S], of all data in a row.

    Pickled it is its path, and is opened and checked anew.
    """

    path: Path
    place: str
    header: Header
    meta: Meta
    files: tuple[ShardFile, ...]
    starts: NDArray[np.uint64]
    splits: dict[Split, Columns]

    def __reduce__(self) -> tuple[Any, ...]:
        return open_index, (self.path, self.place)


def open_index(path: Path, place: str = "") -> Index:
    """Open the index in file `path`: a pack of one file, or the `index.pack` of shards; messages call it `place`.

    Every number is checked: a file that passes cannot make a reader look outside its shards, its names or its classes.
    Of a pack of one file only the header and the index are looked at, so that the rest may be a hole. Raise `DataError`
    for a file that is no pack, of a later version, cut short, damaged or made up.
    """
    place = place or printable(path)
    header, content = _mapped(path, place)
    index = content[header.index_offset :]
    if zlib.crc32(index) != header.index_crc32:
        raise DataError(f"{place}: its index is damaged: its checksum is another ({_FIX})")
    if len(index) < Layout.of(Sizes(0, 0, (0, 0), (0, 0))).num_bytes:
        raise _made_up(place, "it is too short")
    sizes = Sizes.parsed(bytes(index[:ALIGNMENT]))
    layout = Layout.of(sizes)
    if layout.num_bytes != len(index) or sizes.meta_bytes > MAX_META_BYTES or sizes.num_shards > MAX_SHARDS:
        raise _made_up(place, "its sizes do not add up")
    # Bytes that belong to nothing could be chosen so that the checksum of another index fits.
    if any(any(index[start:stop]) for start, stop in layout.gaps):
        raise _made_up(place, "bytes between its columns are not zero")
    meta = Meta.parsed(bytes(index[layout.meta : layout.meta + sizes.meta_bytes]), place)
    files = _files(path, place, header, np.frombuffer(index, SHARD_DTYPE, sizes.num_shards, layout.shards))
    is_whole = header.role is Role.WHOLE  # its last bytes are the index, and no sample's
    data_bytes = np.array(
        [header.data_bytes if is_whole else each.num_bytes - HEADER_BYTES for each in files], np.uint64
    )
    starts = np.cumsum(data_bytes, dtype=np.uint64) - data_bytes
    splits: dict[Split, Columns] = {}
    for number, split in enumerate(SPLITS):
        splits[split] = _columns(index, sizes, layout, number)
    found = Index(path, place, header, meta, files, starts, splits)
    _check(found, data_bytes)
    return found


def index_file(root: Path) -> Path:
    """Return the file that holds the index of the pack `root`: itself, or `index.pack` where it is a folder.

    Raise `DataError` for a folder that has none.
    """
    if not root.is_dir():
        return root
    if not (root / INDEX_NAME).exists():
        raise DataError(f"{printable(root)}: is a folder without {INDEX_NAME}, so no pack (name a pack)")
    return root / INDEX_NAME


def _mapped(path: Path, place: str) -> tuple[Header, memoryview]:
    """Return the header of a file and its bytes, mapped."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            header = Header.parsed(os.pread(descriptor, HEADER_BYTES, 0), place)
            num_bytes = os.fstat(descriptor).st_size
            if header.role is Role.SHARD:
                raise DataError(f"{place}: is a shard of a pack (name the folder that it lies in)")
            if num_bytes != header.num_bytes:
                raise DataError(
                    f"{place}: has {count(num_bytes, 'byte')}, and its header says {header.num_bytes:,} (it is cut "
                    f"short or was added to; {_FIX})"
                )
            return header, mapped(descriptor, num_bytes, path)
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        if isinstance(error, FileNotFoundError) or getattr(error, "errno", 0) == errno.ENOTDIR:
            raise DataError(f"{place}: does not exist (name a pack that paceline data pack has written)") from error
        raise unreadable(path, error) from error


def _files(path: Path, place: str, header: Header, table: NDArray[np.void]) -> tuple[ShardFile, ...]:
    if header.role is Role.WHOLE:
        if len(table) or header.num_shards != 1:
            raise _made_up(place, "it lists shards and is one file")
        return (ShardFile(path.name, header.num_bytes, zlib.crc32(header.packed())),)
    rows = table.tolist()
    total = sum(num_bytes - HEADER_BYTES for num_bytes, _, _ in rows)
    if any(zero for *_, zero in rows):
        raise _made_up(place, "bytes of its list of shards are not zero")
    if len(rows) != header.num_shards or any(num_bytes < HEADER_BYTES for num_bytes, _, _ in rows) or total >= 1 << 62:
        raise _made_up(place, "its list of shards is none")
    return tuple(ShardFile(shard_name(number), row[0], row[1]) for number, row in enumerate(rows))


def _columns(index: memoryview, sizes: Sizes, layout: Layout, number: int) -> Columns:
    num_samples, start = sizes.samples[number], layout.names[number]
    arrays: dict[str, Any] = {
        name: np.frombuffer(index, column.dtype, num_samples, column.offset)
        for name, column in layout.columns[number].items()
    }
    assert arrays.keys() == COLUMNS.keys()
    return Columns(**arrays, names=index[start : start + sizes.names_bytes[number]])


def _check(index: Index, data_bytes: NDArray[np.uint64]) -> None:
    """Look at every sample's numbers, so many rows at a time that it takes no memory."""
    end = 0  # of the sample before, in all data
    total = int(index.starts[-1]) + int(data_bytes[-1])
    for split in SPLITS:
        columns = index.splits[split]
        if split == "train" and not len(columns):
            raise DataError(f"{index.place}: has no {split} images ({_FIX})")
        if int(columns.name_ends[-1] if len(columns) else 0) != len(columns.names):
            raise _made_up(index.place, f"the names of {split} do not add up")
        if not len(columns):  # nothing was held out
            continue
        for first in range(0, len(columns), _ROWS_AT_ONCE):
            rows = slice(first, first + _ROWS_AT_ONCE)
            reason = _trouble(index.meta, columns, rows, end, total)
            if reason:
                raise _made_up(index.place, f"{reason} of {split} images {first:,} to {rows.stop:,}")
            last = min(rows.stop, len(columns)) - 1
            end = int(columns.offsets[last]) + int(columns.lengths[last])
        # Samples follow one another, so only the last one before the end of a shard can reach beyond it.
        befores = np.searchsorted(columns.offsets, index.starts[1:]) - 1
        if (columns.offsets[befores] + columns.lengths[befores] > index.starts[1:])[befores >= 0].any():
            raise _made_up(index.place, f"a sample of {split} lies in two shards")


def _trouble(meta: Meta, columns: Columns, rows: slice, end: int, total: int) -> str:
    """Return what is impossible about some rows, or "".

    `end` is where the sample before them ends, and `total` the bytes of all data.
    """
    kinds, labels, ends = columns.kinds[rows], columns.labels[rows], columns.name_ends[rows]
    if kinds.max() > max(KIND_PIXELS, KIND_RECORD, KIND_FILE):
        return "the kinds"
    if labels.min() < 0 or labels.max() >= len(meta.class_names):
        return "the labels"
    before = int(columns.name_ends[rows.start - 1]) if rows.start else 0
    if int(ends[0]) < before or (ends[1:] < ends[:-1]).any() or int(ends[-1]) > len(columns.names):
        return "the names"
    offsets, lengths = columns.offsets[rows], columns.lengths[rows]
    if int(offsets.max()) > total or int(offsets[0]) < end:
        return "the offsets"
    stops = offsets + lengths  # of 32 bits added to what is known to be small: this cannot wrap
    if (offsets[1:] < stops[:-1]).any() or int(stops[-1]) > total:
        return "the offsets"
    return "" if _fits(meta, kinds, columns.heights[rows], columns.widths[rows], lengths) else "the sizes"


def _fits(
    meta: Meta,
    kinds: NDArray[np.uint8],
    heights: NDArray[np.uint16],
    widths: NDArray[np.uint16],
    lengths: NDArray[np.uint32],
) -> bool:
    """Whether records and pixels have a size, and pixels as many bytes as that says."""
    if heights.min() == 0 or widths.min() == 0:
        is_empty = (heights == 0) | (widths == 0)
        if (is_empty & (kinds != KIND_FILE)).any():
            return False
    is_pixels = kinds == KIND_PIXELS
    if not is_pixels.any():
        return True
    num_bytes = heights[is_pixels].astype(np.uint64) * widths[is_pixels] * np.uint64(meta.channels)
    return bool((num_bytes == lengths[is_pixels]).all())


def _made_up(place: str, what: str) -> DataError:
    return DataError(f"{place}: its index cannot be true: {what} ({_FIX})")
