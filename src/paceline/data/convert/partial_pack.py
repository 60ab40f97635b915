"""An unfinished pack on disk, from which an interrupted `data pack` resumes at the first unfinished shard.

Samples are appended to a data file per shard. The rows of a shard, one per sample, are written once its data are on
disk, so a shard that has rows is complete. A pack of one file is one shard.
"""

import contextlib
import json
import os
import re
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import DataError
from paceline.core.files import RefusedFileError, make_folder, open_to_write, read_bytes, remove_abandoned, replace_file
from paceline.data.convert.encode import EncodedSample
from paceline.data.file_lock import FileLock, acquire_file_lock
from paceline.data.files import fsync_file, printable
from paceline.data.pack.format import ALIGNMENT, INDEX_NAME, KIND_PIXELS, align_offset, shard_name
from paceline.data.pack.shards import HEADER_BYTES

KEY_NAME = "pack.key"
# A sample. `offset` counts from the start of the shard's data, `reason` is the number of a reason (0 for none), and
# `file_state` is of the file that the sample was read from (`encode.build_file_state_function`).
ROW_DTYPE = np.dtype([
    ("offset", "<u8"), ("file_state", "<u8"), ("length", "<u4"), ("crc32", "<u4"), ("label", "<i4"), ("reason", "<u4"),
    ("height", "<u2"), ("width", "<u2"), ("kind", "u1"), ("is_bad", "u1"),
])  # fmt: skip
_ROW_STRUCT = struct.Struct("<QQIIiIHHBB")
_MAGIC = b"plkey\r\n\0"
# Shards, their rows, and temporary files of `replace_file`.
_KNOWN_NAMES = re.compile(r"data-\d{5,}\.(pack|rows)|\.data-\d{5,}\.rows\.[0-9a-f]{16}\.tmp")
_SAMPLE_ALIGNMENT = 8
_MAX_LENGTH = (1 << 32) - 1


@dataclass(frozen=True, eq=False)
class PackedShard:
    """A complete shard: its samples, `ROW_DTYPE` [n], the texts of their reasons, and size and CRC-32 of its data."""

    rows: NDArray[np.void]
    reasons: list[str]
    data_bytes: int
    data_crc32: int

    def to_bytes(self) -> bytes:
        """Return one line of JSON and the rows."""
        facts = {"reasons": self.reasons, "data_bytes": self.data_bytes, "data_crc32": self.data_crc32}
        return json.dumps(facts).encode() + b"\n" + self.rows.tobytes()

    @classmethod
    def from_bytes(cls, content: bytes) -> "PackedShard":
        """Parse what `to_bytes` has returned."""
        facts, _, rows = content.partition(b"\n")
        return cls(np.frombuffer(rows, ROW_DTYPE), **json.loads(facts))


@dataclass
class PartialPack:
    """The complete shards, and the samples of the next one. `assemble_pack` turns it into a pack."""

    folder: Path
    shard_bytes: int | None
    _lock: FileLock
    shards: list[PackedShard] = field(default_factory=list)
    num_done: int = 0
    _data: IO[bytes] | None = None  # of the next shard, like all below
    _data_bytes: int = 0  # without the header
    _data_crc32: int = 0
    _rows: bytearray = field(default_factory=bytearray)
    _reasons: dict[str, int] = field(default_factory=lambda: {"": 0})

    @classmethod
    def open(cls, folder: Path, key: bytes, shard_bytes: int | None, *, keeps_bad: bool = True) -> "PartialPack":
        """Create or resume an unfinished pack in `folder`; its `key`, 32 bytes, identifies source and options.

        Raise `DataError` if shards are complete and the key differs, another process has the pack open, or the folder
        belongs to another user or holds other files. Without `keeps_bad`, resume at the first shard with an unreadable
        image, with any key.
        """
        _prepare_folder(folder)
        lock = acquire_file_lock(folder / KEY_NAME, is_exclusive=True, should_wait=False)
        if lock is None:
            raise DataError(f"{printable(folder)}: another process is writing to it (wait for it, or end it)")
        try:
            remove_abandoned(folder)  # temporary files of killed processes
            opened = cls(folder, shard_bytes, lock)
            opened._resume(key, keeps_bad=keeps_bad)
        except BaseException:
            lock.close()
            raise
        return opened

    def add(self, sample: EncodedSample, *, is_first: bool) -> None:
        """Append a sample, aligned if it `is_first` of its split. Raise `DataError` from 4 GiB."""
        if len(sample.data) > _MAX_LENGTH:
            raise DataError(f"sample {self.num_done:,}: has {len(sample.data):,} bytes, more than a pack holds (4 GiB)")
        # Pixels of a split follow without gaps, so that the reader can map them as one array.
        alignment = ALIGNMENT if is_first else 1 if sample.kind == KIND_PIXELS else _SAMPLE_ALIGNMENT
        start = align_offset(self._data_bytes, alignment)
        if self.shard_bytes and self._data_bytes and HEADER_BYTES + start + len(sample.data) > self.shard_bytes:
            self.finish_shard()
            start = 0
        if self._data is None:
            self._data = open_to_write(self.get_data_path(len(self.shards)), "x+b")
            self._data.write(bytes(HEADER_BYTES))
        padding = bytes(start - self._data_bytes)
        self._data.write(padding)
        self._data.write(sample.data)
        self._data_crc32 = zlib.crc32(sample.data, zlib.crc32(padding, self._data_crc32))
        self._data_bytes = start + len(sample.data)
        self._rows += _ROW_STRUCT.pack(
            start, sample.file_state, len(sample.data), zlib.crc32(sample.data), sample.label,
            self._reasons.setdefault(sample.unchanged_reason, len(self._reasons)),
            sample.height, sample.width, sample.kind, sample.is_bad,
        )  # fmt: skip
        self.num_done += 1

    def finish_shard(self) -> None:
        """Write the samples since the last shard to disk: data, then rows."""
        if self._data is None:
            return
        fsync_file(self._data)
        self._data.close()
        rows = np.frombuffer(bytes(self._rows), ROW_DTYPE)
        shard = PackedShard(rows, list(self._reasons), self._data_bytes, self._data_crc32)
        with replace_file(self._get_rows_path(len(self.shards))) as file:
            file.write(shard.to_bytes())
        self.shards.append(shard)
        self._data, self._data_bytes, self._data_crc32 = None, 0, 0
        self._rows.clear()
        self._reasons = {"": 0}

    def iter_bad(self) -> Iterator[tuple[int, str]]:
        """Yield the number of each unreadable sample and the reason."""
        first = 0
        for shard in self.shards:
            for number in np.flatnonzero(shard.rows["is_bad"]).tolist():
                yield first + number, shard.reasons[shard.rows["reason"][number]]
            first += len(shard.rows)

    def keep_before(self, sample: int) -> None:
        """Discard all that depends on number `sample` and later ones. Call it before `add`."""
        # A shard also depends on the sample after it, which did not fit into it.
        ends = np.cumsum([len(shard.rows) for shard in self.shards])
        self._keep_shards(int(np.searchsorted(ends, sample, side="left")))

    def get_data_path(self, shard: int) -> Path:
        """Return the path of a shard's data file."""
        return self.folder / shard_name(shard)

    def close(self) -> None:
        """Close the files and release the lock. An unfinished shard is lost."""
        if self._data is not None:
            with contextlib.suppress(OSError):  # a full disk, which was reported before
                self._data.close()
        self._lock.close()

    def _get_rows_path(self, shard: int) -> Path:
        return self.get_data_path(shard).with_suffix(".rows")

    def _resume(self, key: bytes, *, keeps_bad: bool) -> None:
        stored = os.pread(self._lock.descriptor, len(_MAGIC) + len(key), 0)
        if not _MAGIC.startswith(stored[: len(_MAGIC)]):
            raise DataError(
                f"{printable(self.folder / KEY_NAME)}: is not of an unfinished pack (move it away, or write elsewhere)"
            )
        while (shard := self._read_shard(len(self.shards))) is not None:
            self.shards.append(shard)
        is_same = stored == _MAGIC + key
        num_good = next((at for at, each in enumerate(self.shards) if each.rows["is_bad"].any()), len(self.shards))
        # Fixing an unreadable image may change the source, and so the key: such a pack is started again, not refused.
        if not is_same and self.shards and (keeps_bad or num_good == len(self.shards)):
            raise DataError(
                f"{printable(self.folder)}: is an unfinished pack of another source or with other options (finish "
                f"that one, or remove the folder)"
            )
        self._keep_shards(0 if not is_same else len(self.shards) if keeps_bad else num_good)
        os.ftruncate(self._lock.descriptor, 0)
        os.pwrite(self._lock.descriptor, _MAGIC + key, 0)

    def _keep_shards(self, num: int) -> None:
        self.shards = self.shards[:num]
        self.num_done = sum(len(shard.rows) for shard in self.shards)
        for suffix in ("rows", "pack"):  # rows first, as they state that the data are complete
            for path in self.folder.glob(f"data-*.{suffix}"):
                if path.stem >= Path(shard_name(num)).stem:
                    path.unlink()

    def _read_shard(self, number: int) -> PackedShard | None:
        try:
            shard = PackedShard.from_bytes(read_bytes(self._get_rows_path(number)))
            num_bytes = self.get_data_path(number).stat().st_size
        except (OSError, ValueError, TypeError):
            return None
        # `assemble_pack` may have appended an index.
        return shard if num_bytes >= HEADER_BYTES + shard.data_bytes else None


def find_foreign_file(folder: Path) -> str:
    """Return the name of an entry of `folder` that is not of a pack, or ""."""
    for path in sorted(folder.iterdir()):
        is_named = _KNOWN_NAMES.fullmatch(path.name) or path.name in (INDEX_NAME, KEY_NAME)
        if not is_named or path.is_symlink() or not path.is_file():
            return path.name
    return ""


def remove_pack(path: Path) -> None:
    """Remove a finished or unfinished pack, unless the folder holds other files. Raise `OSError`."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    if not find_foreign_file(path):
        for each in list(path.iterdir()):
            each.unlink()
        path.rmdir()


def _prepare_folder(folder: Path) -> None:
    try:
        make_folder(folder, 0o700)
    except RefusedFileError as error:
        raise DataError(f"{printable(folder)}: {error.strerror} (remove it, or write elsewhere)") from error
    foreign = find_foreign_file(folder)
    if foreign:
        raise DataError(
            f"{printable(folder / foreign)}: is not part of an unfinished pack (move it away, or write elsewhere)"
        )
