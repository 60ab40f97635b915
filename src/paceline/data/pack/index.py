"""Open the index of a pack: map it, compare its checksum, and validate every number in it."""

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
from paceline.data.files import printable
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
    FileRole,
    IndexLayout,
    IndexSizes,
    PackHeader,
    PackMeta,
    shard_name,
)
from paceline.data.pack.shards import HEADER_BYTES, ShardFile, build_read_error, map_file

# Samples per check, which bounds its memory.
_ROWS_PER_CHECK = 1 << 18
_FIX = "pack it again, or copy it again from where it is whole"


@dataclass(frozen=True, eq=False)
class SplitColumns:
    """Index columns of the N samples of a split: read-only maps of shape [N]."""

    offsets: NDArray[np.uint64]  # in the concatenated data of all shards
    name_ends: NDArray[np.uint64]  # in `names`; a name starts at the end of the one before
    lengths: NDArray[np.uint32]  # in stored bytes
    crc32s: NDArray[np.uint32]  # of the stored bytes
    labels: NDArray[np.int32]
    heights: NDArray[np.uint16]  # of the upright image; 0 if unknown or above 65,535
    widths: NDArray[np.uint16]
    kinds: NDArray[np.uint8]  # `format.KIND_*`
    names: memoryview  # empty if the source has none

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, eq=False)
class PackIndex:
    """An open index. Data of its S shards `files` start at `starts`, uint64 [S], in the concatenated data.

    Unpickling opens and checks the file again.
    """

    path: Path
    display_name: str
    header: PackHeader
    meta: PackMeta
    files: tuple[ShardFile, ...]
    starts: NDArray[np.uint64]
    splits: dict[Split, SplitColumns]

    def __reduce__(self) -> tuple[Any, ...]:
        return open_index, (self.path, self.display_name)


# Ten million samples open in less than a second and use no memory besides the page cache.
def open_index(path: Path, file_name: str = "") -> PackIndex:
    """Open the index in the file `path`, a pack of one file or the `index.pack` of a folder of shards.

    No offset, name or label of the result is out of bounds. Data are not read, and may be a hole in the file. Raise
    `DataError`, naming `file_name`, for an unknown version and an incomplete or inconsistent file.
    """
    file_name = file_name or printable(path)
    header, content = _map_index(path, file_name)
    index = content[header.index_offset :]
    if zlib.crc32(index) != header.index_crc32:
        raise DataError(f"{file_name}: its index is damaged: the checksum does not match ({_FIX})")
    if len(index) < IndexLayout.from_sizes(IndexSizes(0, 0, (0, 0), (0, 0))).num_bytes:
        raise _build_invalid_error(file_name, "it is too short")
    sizes = IndexSizes.from_bytes(bytes(index[:ALIGNMENT]))
    layout = IndexLayout.from_sizes(sizes)
    if layout.num_bytes != len(index) or sizes.meta_bytes > MAX_META_BYTES or sizes.num_shards > MAX_SHARDS:
        raise _build_invalid_error(file_name, "its sizes do not add up")
    # Arbitrary padding bytes would allow a forged index with a matching checksum: CRC-32 is linear.
    if any(any(index[start:stop]) for start, stop in layout.gaps):
        raise _build_invalid_error(file_name, "bytes between its columns are not zero")
    meta = PackMeta.from_json(bytes(index[layout.meta : layout.meta + sizes.meta_bytes]), file_name)
    files = _parse_shard_table(
        path, file_name, header, np.frombuffer(index, SHARD_DTYPE, sizes.num_shards, layout.shards)
    )
    is_whole = header.role is FileRole.WHOLE  # such a file ends with the index, not with data
    data_bytes = np.array(
        [header.data_bytes if is_whole else each.num_bytes - HEADER_BYTES for each in files], np.uint64
    )
    starts = np.cumsum(data_bytes, dtype=np.uint64) - data_bytes
    splits: dict[Split, SplitColumns] = {}
    for number, split in enumerate(SPLITS):
        splits[split] = _parse_columns(index, sizes, layout, number)
    opened = PackIndex(path, file_name, header, meta, files, starts, splits)
    _check_columns(opened, data_bytes)
    return opened


def find_index_file(root: Path) -> Path:
    """Return the file with the index of the pack `root`. Raise `DataError` for a folder without one."""
    if not root.is_dir():
        return root
    if not (root / INDEX_NAME).exists():
        raise DataError(f"{printable(root)}: is a folder without {INDEX_NAME}, not a pack (name a pack)")
    return root / INDEX_NAME


def _map_index(path: Path, file_name: str) -> tuple[PackHeader, memoryview]:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # do not wait for a pipe
        try:
            header = PackHeader.from_bytes(os.pread(descriptor, HEADER_BYTES, 0), file_name)
            num_bytes = os.fstat(descriptor).st_size
            if header.role is FileRole.SHARD:
                raise DataError(f"{file_name}: is a shard of a pack (name the folder that it lies in)")
            if num_bytes != header.num_bytes:
                raise DataError(
                    f"{file_name}: has {count(num_bytes, 'byte')}, and its header says {header.num_bytes:,} (it is "
                    f"truncated or was appended to; {_FIX})"
                )
            return header, map_file(descriptor, num_bytes, path)
        finally:
            os.close(descriptor)  # the map stays valid
    except (OSError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        if isinstance(error, FileNotFoundError) or getattr(error, "errno", 0) == errno.ENOTDIR:
            raise DataError(f"{file_name}: does not exist (name a pack that paceline data pack has written)") from error
        raise build_read_error(path, error) from error


def _parse_shard_table(
    path: Path, file_name: str, header: PackHeader, table: NDArray[np.void]
) -> tuple[ShardFile, ...]:
    if header.role is FileRole.WHOLE:
        if len(table) or header.num_shards != 1:
            raise _build_invalid_error(file_name, "it lists shards and is one file")
        return (ShardFile(path.name, header.num_bytes, zlib.crc32(header.to_bytes())),)
    rows = table.tolist()
    total = sum(num_bytes - HEADER_BYTES for num_bytes, _, _ in rows)
    if any(zero for *_, zero in rows):
        raise _build_invalid_error(file_name, "bytes of its list of shards are not zero")
    # Below 2**62, all sums of offsets and lengths fit into uint64.
    if len(rows) != header.num_shards or any(num_bytes < HEADER_BYTES for num_bytes, _, _ in rows) or total >= 1 << 62:
        raise _build_invalid_error(file_name, "its list of shards is invalid")
    return tuple(ShardFile(shard_name(number), row[0], row[1]) for number, row in enumerate(rows))


def _parse_columns(index: memoryview, sizes: IndexSizes, layout: IndexLayout, number: int) -> SplitColumns:
    num_samples, start = sizes.samples[number], layout.names[number]
    arrays: dict[str, Any] = {
        name: np.frombuffer(index, column.dtype, num_samples, column.offset)
        for name, column in layout.columns[number].items()
    }
    assert arrays.keys() == COLUMNS.keys()
    return SplitColumns(**arrays, names=index[start : start + sizes.names_bytes[number]])


def _check_columns(index: PackIndex, data_bytes: NDArray[np.uint64]) -> None:
    end = 0  # of the previous sample
    total = int(index.starts[-1]) + int(data_bytes[-1])
    for split in SPLITS:
        columns = index.splits[split]
        targets = index.meta.decode_targets(split)
        num_labels = len(index.meta.class_names) if targets is None else len(targets.rows)
        if split == "train" and not len(columns):
            raise DataError(f"{index.display_name}: has no {split} images ({_FIX})")
        if int(columns.name_ends[-1] if len(columns) else 0) != len(columns.names):
            raise _build_invalid_error(index.display_name, f"the names of {split} do not add up")
        if not len(columns):  # an empty validation split
            continue
        for first in range(0, len(columns), _ROWS_PER_CHECK):
            rows = slice(first, first + _ROWS_PER_CHECK)
            reason = _find_invalid_column(index.meta, columns, num_labels, rows, end, total)
            if reason:
                raise _build_invalid_error(index.display_name, f"{reason} of {split} images {first:,} to {rows.stop:,}")
            last = min(rows.stop, len(columns)) - 1
            end = int(columns.offsets[last]) + int(columns.lengths[last])
        # Samples do not overlap, so only the last one of a shard can cross its end.
        last_samples = np.searchsorted(columns.offsets, index.starts[1:]) - 1
        if (columns.offsets[last_samples] + columns.lengths[last_samples] > index.starts[1:])[last_samples >= 0].any():
            raise _build_invalid_error(index.display_name, f"a sample of {split} lies in two shards")


def _find_invalid_column(
    meta: PackMeta, columns: SplitColumns, num_labels: int, rows: slice, end: int, total: int
) -> str:
    """Return the column with an impossible value in `rows`, or ""; `end` is the byte after the previous sample."""
    kinds, labels, ends = columns.kinds[rows], columns.labels[rows], columns.name_ends[rows]
    if kinds.max() > max(KIND_PIXELS, KIND_RECORD, KIND_FILE):
        return "the kinds"
    if labels.min() < 0 or labels.max() >= num_labels:
        return "the labels"
    previous_end = int(columns.name_ends[rows.start - 1]) if rows.start else 0
    if int(ends[0]) < previous_end or (ends[1:] < ends[:-1]).any() or int(ends[-1]) > len(columns.names):
        return "the names"
    offsets, lengths = columns.offsets[rows], columns.lengths[rows]
    if int(offsets.max()) > total or int(offsets[0]) < end:
        return "the offsets"
    stops = offsets + lengths  # cannot overflow: offsets are at most `total`, lengths have 32 bits
    if (offsets[1:] < stops[:-1]).any() or int(stops[-1]) > total:
        return "the offsets"
    return "" if _has_valid_sizes(meta, kinds, columns.heights[rows], columns.widths[rows], lengths) else "the sizes"


def _has_valid_sizes(
    meta: PackMeta,
    kinds: NDArray[np.uint8],
    heights: NDArray[np.uint16],
    widths: NDArray[np.uint16],
    lengths: NDArray[np.uint32],
) -> bool:
    if heights.min() == 0 or widths.min() == 0:
        is_unknown = (heights == 0) | (widths == 0)  # only a file may have an unknown size
        if (is_unknown & (kinds != KIND_FILE)).any():
            return False
    is_pixels = kinds == KIND_PIXELS
    if not is_pixels.any():
        return True
    num_bytes = heights[is_pixels].astype(np.uint64) * widths[is_pixels] * np.uint64(meta.channels)
    num_bytes *= np.uint64(np.dtype(meta.pixels).itemsize)
    return bool((num_bytes == lengths[is_pixels]).all())


def _build_invalid_error(file_name: str, what: str) -> DataError:
    return DataError(f"{file_name}: its index is inconsistent: {what} ({_FIX})")
