"""Keep the indexes of JPEG files in a folder, so that each file is indexed once. Torch-free.

The native extension makes an index when it decodes a file for the first time, and decodes faster with it
(docs/reference/indexed-jpeg.md). It compares an index with the content of the file at each use, so a stale or damaged
one costs time and changes no pixel.
"""

import contextlib
import hashlib
import os
import re
import secrets
import stat
import struct
import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.core.files import make_folder, remove_abandoned, replace_file
from paceline.core.units import size
from paceline.data.file_lock import FileLock, acquire_file_lock
from paceline.data.files import OpenFile, expand_path, printable
from paceline.data.pack.shards import map_file
from paceline.recipe.schema.data import Data

_DEFAULT_FOLDER: Final = "~/.cache/paceline/jpeg-index"
# Entries that are held in memory before they are written: a killed run loses no more than these.
_SEGMENT_BYTES: Final = 64 << 20
# Of what is stored, the part that must have been added before a segment is written only because it is needed again.
_WORTHWHILE: Final = 1 / 16
_LOCK_ATTEMPTS: Final = 200
_LOCK_POLL_S: Final = 0.05
# `NUMBER-RANDOM.index`; no other file is ever removed.
_SEGMENT_NAME: Final = re.compile(r"([0-9]{8})-[0-9a-f]{16}\.index")
_MAGIC: Final = b"PLINDEX1"
_HEADER: Final = struct.Struct("<8sQQQ")  # magic, start of the table, number of entries, CRC-32 of the table
_ROW: Final = np.dtype(
    [("name", "<u8"), ("offset", "<u8"), ("length", "<u4"), ("height", "<u2"), ("width", "<u2"), ("segment", "<u4")]
)
# Of a file's size, in an entry.
_FILE_SIZE_OFFSET: Final = 16
_NO_ROWS: Final = np.empty(0, dtype=_ROW)


class FoundIndexes(NamedTuple):
    """The indexes of N files: `lengths[n]` bytes of `buffers[buffer_of[n]]` from `offsets[n]` on, 0 without one.

    `sizes`, uint16 [N, 2], are the upright (height, width) of the images, 0 if unknown.
    """

    buffers: tuple[memoryview, ...]
    buffer_of: NDArray[np.int32]
    offsets: NDArray[np.uint64]
    lengths: NDArray[np.uint64]
    sizes: NDArray[np.uint16]

    def get_file_bytes(self, row: int) -> int | None:
        """Return the size in bytes that a file had when it was indexed, None without an index."""
        if not self.lengths[row]:
            return None
        start = int(self.offsets[row]) + _FILE_SIZE_OFFSET
        return int.from_bytes(self.buffers[self.buffer_of[row]][start : start + 8], "little")

    def take(self, rows: slice) -> "FoundIndexes":
        """Return the indexes of some of the files."""
        return FoundIndexes(
            self.buffers, self.buffer_of[rows], self.offsets[rows], self.lengths[rows], self.sizes[rows]
        )


class NoIndexCache:
    """Store nothing."""

    def refresh(self) -> None:
        """Do nothing."""

    def find(self, names: Sequence[bytes]) -> FoundIndexes:
        """Find nothing."""
        return _Table(_NO_ROWS).get((), _hash(names))[0]

    def add(self, names: Sequence[bytes], sizes: NDArray[np.integer], indexes: Sequence[bytes]) -> None:
        """Do nothing."""

    def seal(self) -> None:
        """Do nothing."""


def build_index_cache(data: Data, root: str, warn: Callable[[str], None]) -> "IndexCache | NoIndexCache":
    """Build the cache of `data.cache` for the dataset at `root`; `warn` gets one line if it cannot be written."""
    if data.cache == "off":
        return NoIndexCache()
    folder = expand_path(_DEFAULT_FOLDER if data.cache == "auto" else data.cache)
    if folder.parts[:1] == ("~",):
        warn("data.cache: there is no home folder for the index cache (set data.cache to a folder, or to off)")
        return NoIndexCache()
    return IndexCache(folder.absolute(), root, round(data.cache_gb * 1e9), warn)


# `FOLDER/DATASET/` has the segments of a dataset, named by the hash of its root. A segment is written at once and
# never changed: header, entries, and a table of them. Processes of all ranks and runs write segments of their own, and
# find those of others in `refresh`. They are numbered, and a file's newest index counts.
class IndexCache:
    """The indexes of the files of the dataset at `root`, stored below `folder`, of at most `max_bytes` in all.

    A segment that cannot be read is ignored. If none can be written, `warn` gets one line and nothing more is written.
    """

    def __init__(self, folder: Path, root: str, max_bytes: int, warn: Callable[[str], None]) -> None:
        self._folder = folder
        self._own_folder = folder / hashlib.blake2b(os.fsencode(root), digest_size=8).hexdigest()
        self._max_bytes = max_bytes
        self._warn = warn
        self._segments: dict[str, _Segment | None] = {}  # by file name, in order of creation; None: not usable
        self._buffers: tuple[memoryview, ...] = ()
        self._table = _Table(_NO_ROWS)  # of all segments
        self._lock = threading.Lock()  # of the following
        self._added: dict[int, tuple[int, int, bytes]] = {}  # by the hash of the name: height, width and index
        self._added_bytes = 0
        self._can_write = True

    def refresh(self) -> None:
        """Find what other processes have written; mark the segments of the dataset as used if there are new ones."""
        names = self._list_segments()
        if names == list(self._segments):
            return
        for name in names:
            with contextlib.suppress(OSError):
                os.utime(self._own_folder / name)
        known = self._segments
        self._segments = {name: known[name] if name in known else self._open(name) for name in names}
        segments = [segment for segment in self._segments.values() if segment is not None]
        self._buffers = tuple(segment.memory for segment in segments)
        self._table = _Table(_merge([segment.rows for segment in segments]))

    def find(self, names: Sequence[bytes]) -> FoundIndexes:
        """Return the indexes of N files; write those that were added if one of them is needed again."""
        keys = _hash(names)
        found, is_missing = self._table.get(self._buffers, keys)
        if not is_missing.any():
            return found
        with self._lock:
            is_worthwhile = len(self._added) > _WORTHWHILE * len(self._table)
            is_needed = is_worthwhile and any(key in self._added for key in keys[is_missing].tolist())
        if is_needed:
            self.seal()
        self.refresh()
        return self._table.get(self._buffers, keys)[0]

    def add(self, names: Sequence[bytes], sizes: NDArray[np.integer], indexes: Sequence[bytes]) -> None:
        """Store the indexes of N files, whose images have `sizes`, integers [N, 2], upright (height, width).

        Any thread may call it.
        """
        with self._lock:
            if not self._can_write:
                return
            for key, (height, width), index in zip(_hash(names).tolist(), sizes.tolist(), indexes, strict=True):
                replaced = self._added.pop(key, (0, 0, b""))
                self._added[key] = height, width, index
                self._added_bytes += len(index) - len(replaced[2])
            is_full = self._added_bytes >= _SEGMENT_BYTES
        if is_full:
            self.seal()

    def seal(self) -> None:
        """Write a segment of what was added since the last one."""
        with self._lock:
            added, self._added, self._added_bytes = self._added, {}, 0
        if not added:
            return
        try:
            problem = self._write(added)
        except OSError as error:
            problem = (
                f"{printable(self._folder)}: {error.strerror or error} (name another folder, or set data.cache=off)"
            )
        if problem:
            with self._lock:
                is_first, self._can_write = self._can_write, False
            if is_first:
                self._warn(f"data.cache: indexes of JPEG files are no longer written: {problem}")

    def _list_segments(self) -> list[str]:
        try:
            names = [path.name for path in self._own_folder.iterdir()]
        except OSError:  # nothing was written yet, or it cannot be read
            return []
        return sorted(name for name in names if _SEGMENT_NAME.fullmatch(name))

    def _open(self, name: str) -> "_Segment | None":
        try:
            return _Segment.open(self._own_folder / name)
        except (OSError, ValueError):
            return None

    def _write(self, added: dict[int, tuple[int, int, bytes]]) -> str:
        """Write a segment; return why the cache is full, or ""."""
        self._folder.mkdir(parents=True, exist_ok=True)
        make_folder(self._own_folder)
        header, rows = _build_table(added)
        num_bytes = int(rows["offset"][-1]) + int(rows["length"][-1]) + rows.nbytes
        with contextlib.closing(self._lock_room()):
            remove_abandoned(self._own_folder)
            if not self._make_room(num_bytes):
                return (
                    f"those of this dataset fill the {size(self._max_bytes)} of {printable(self._folder)} (raise "
                    f"data.cache_gb, or remove the folder if the images have changed)"
                )
            number = 1 + max((int(name.partition("-")[0]) for name in self._list_segments()), default=0)
            name = f"{number:08}-{secrets.token_hex(8)}.index"
            # Not flushed to disk: after a power failure the checksum of the table shows an incomplete segment.
            with replace_file(self._own_folder / name, sync=False) as file:
                file.write(header)
                file.writelines(index for _, _, index in added.values())
                file.write(rows.tobytes())
        return ""

    def _lock_room(self) -> FileLock:
        pause = threading.Event()
        for _ in range(_LOCK_ATTEMPTS):
            lock = acquire_file_lock(self._folder / "room.lock", is_exclusive=True, should_wait=False)
            if lock is not None:
                return lock
            pause.wait(_LOCK_POLL_S)
        raise TimeoutError("another process holds room.lock")

    def _make_room(self, num_bytes: int) -> bool:
        """Remove the least recently used segments of other datasets until `num_bytes` fit; return whether they do."""
        stored = []
        for path in self._folder.glob("*/*.index"):
            with contextlib.suppress(OSError):
                status = path.lstat()
                if _SEGMENT_NAME.fullmatch(path.name) and stat.S_ISREG(status.st_mode):
                    stored.append((status.st_mtime_ns, status.st_size, path))
        excess = sum(stored_bytes for _, stored_bytes, _ in stored) + num_bytes - self._max_bytes
        # A dataset larger than the cache would evict in each epoch what the next one needs.
        others = sorted(each for each in stored if each[2].parent != self._own_folder)
        if excess > sum(stored_bytes for _, stored_bytes, _ in others):
            return False
        for _, stored_bytes, path in others:
            if excess <= 0:
                break
            path.unlink(missing_ok=True)
            excess -= stored_bytes
        return True


class _Table:
    """Rows sorted by name."""

    def __init__(self, rows: NDArray[np.void]) -> None:
        self._rows = rows
        self._names = np.ascontiguousarray(rows["name"])

    def __len__(self) -> int:
        return len(self._names)

    def get(self, buffers: tuple[memoryview, ...], keys: NDArray[np.uint64]) -> tuple[FoundIndexes, NDArray[np.bool_]]:
        """Return the indexes of N files by the hashes of their names, uint64 [N], and which are missing, bool [N].

        `buffers` are those of the segments.
        """
        found = np.zeros(len(keys), dtype=_ROW)
        if len(self._rows):
            at = np.minimum(np.searchsorted(self._names, keys), len(self._rows) - 1)
            is_known = self._names[at] == keys
            found[is_known] = self._rows[at[is_known]]
        numbers, buffer_of = np.unique(found["segment"], return_inverse=True)
        indexes = FoundIndexes(
            tuple(buffers[number] for number in numbers.tolist()) if buffers else (memoryview(b""),),
            buffer_of.astype(np.int32),
            found["offset"].astype(np.uint64),
            found["length"].astype(np.uint64),
            np.stack([found["height"], found["width"]], axis=1),
        )
        return indexes, indexes.lengths == 0


@dataclass(frozen=True)
class _Segment:
    """A segment's file as memory, and its table."""

    memory: memoryview
    rows: NDArray[np.void]

    @classmethod
    def open(cls, path: Path) -> "_Segment":
        """Map a segment. Raise `OSError` or `ValueError` if it is not complete."""
        file = OpenFile(str(path))
        header = os.pread(file.descriptor, _HEADER.size, 0)
        if len(header) < _HEADER.size:
            raise ValueError("is too short for a segment")
        magic, start, num_entries, checksum = _HEADER.unpack(header)
        if magic != _MAGIC or start + num_entries * _ROW.itemsize != file.num_bytes:
            raise ValueError("is not a complete segment")
        table = os.pread(file.descriptor, num_entries * _ROW.itemsize, start)
        rows = np.frombuffer(table, dtype=_ROW)
        if (
            zlib.crc32(table) != checksum
            or (rows["offset"] > start).any()
            or (rows["length"] > start - rows["offset"]).any()
        ):
            raise ValueError("is damaged")
        # Without a name: where it is truncated from now on it reads as zeros, which are no index, and that is no error.
        return cls(map_file(file.descriptor, file.num_bytes, None), rows)


def _build_table(added: dict[int, tuple[int, int, bytes]]) -> tuple[bytes, NDArray[np.void]]:
    """Return the header and the table of a segment."""
    rows = np.zeros(len(added), dtype=_ROW)
    rows["name"] = list(added)
    rows["height"] = [height for height, _, _ in added.values()]
    rows["width"] = [width for _, width, _ in added.values()]
    rows["length"] = [len(index) for _, _, index in added.values()]
    ends = _HEADER.size + np.cumsum(rows["length"], dtype=np.uint64)
    rows["offset"] = ends - rows["length"]
    return _HEADER.pack(_MAGIC, int(ends[-1]), len(rows), zlib.crc32(rows.tobytes())), rows


def _merge(tables: Sequence[NDArray[np.void]]) -> NDArray[np.void]:
    """Return the rows of all tables sorted by name, of equal names the last."""
    if not tables:
        return _NO_ROWS
    rows = np.concatenate(tables)
    rows["segment"] = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
    rows = rows[np.argsort(rows["name"], kind="stable")]
    is_last = np.append(rows["name"][1:] != rows["name"][:-1], True)
    return np.asarray(rows[is_last])


def _hash(names: Sequence[bytes]) -> NDArray[np.uint64]:
    return np.frombuffer(b"".join(hashlib.blake2b(name, digest_size=8).digest() for name in names), dtype="<u8")
