"""An unfinished pack on disk: its samples so far and a log of them, from which an interrupted `data pack` resumes.

Samples are appended to data files, and a row of 48 bytes per sample to the log. Data reach the disk before their rows,
so a valid row implies its sample. Resuming cuts off everything after the last valid row, so the files are the same
however often packing was interrupted.
"""

import contextlib
import fcntl
import json
import re
import struct
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import DataError
from paceline.core.files import RefusedFileError, make_folder, open_to_write, remove_abandoned
from paceline.core.json_file import read_json
from paceline.core.run_dir import write_atomic
from paceline.data.convert.encode import EncodedSample
from paceline.data.convert.fsync import fsync_file
from paceline.data.files import printable
from paceline.data.pack.format import ALIGNMENT, INDEX_NAME, KIND_PIXELS, align_offset, shard_name
from paceline.data.pack.shards import HEADER_BYTES

LOG_NAME = "journal"
# A sample in the log. `offset` counts from the start of the shard's data, `data_crc32` covers that data up to the
# sample's end, `reason` is the number of a reason (0 for none), and `file_state` is of the file that the sample was
# read from (`encode.build_file_state_function`).
ROW_DTYPE = np.dtype([
    ("offset", "<u8"), ("length", "<u4"), ("crc32", "<u4"), ("label", "<i4"), ("height", "<u2"), ("width", "<u2"),
    ("kind", "u1"), ("is_bad", "u1"), ("reason", "<u2"), ("shard", "<u4"), ("data_crc32", "<u4"), ("file_state", "<u8"),
    ("row_crc32", "<u4"),
])  # fmt: skip
_ROW_STRUCT = struct.Struct("<QIIiHHBBHIIQI")
_LOG_HEADER = struct.Struct("<8s32s")
_LOG_MAGIC = b"pljournl"
_REASONS_NAME = "reasons.json"
# Shards, and temporary files of `write_atomic`.
_KNOWN_NAMES = re.compile(rf"data-\d{{5,}}\.pack|\.{re.escape(_REASONS_NAME)}\.[0-9a-f]{{16}}\.tmp")
_SAMPLE_ALIGNMENT = 8
# Bounds `reasons.json` if reasons contain details that differ from image to image.
_MAX_REASONS, _OTHER_REASON = 1000, "for yet another reason"
# Samples between two syncs, which a kill can cost.
_SYNC_BYTES, _SYNC_ROWS = 64 << 20, 1 << 16
_MAX_LENGTH = (1 << 32) - 1


@dataclass
class PartialPack:
    """The samples so far and the position of the next one. `assemble_pack` turns it into a pack."""

    folder: Path
    shard_bytes: int | None
    _log: IO[bytes]
    _reasons: list[str]
    num_done: int = 0
    _shard: int = 0
    _data_bytes: int = 0  # of the current shard, without its header
    _data_crc32: int = 0
    _data: IO[bytes] | None = None
    _rows: list[bytes] = field(default_factory=list)  # not yet in the log
    _pending_bytes: int = 0
    _num_saved_reasons: int = 0

    @classmethod
    def open(cls, folder: Path, key: bytes, shard_bytes: int | None, *, keeps_bad: bool = True) -> "PartialPack":
        """Create or resume an unfinished pack in `folder`; its `key`, 32 bytes, identifies source and options.

        Raise `DataError` if the key differs, another process has the pack open, or the folder belongs to another user
        or holds other files. Without `keeps_bad`, resume at the first unreadable image, with any key.
        """
        _prepare_folder(folder)
        log = open_to_write(folder / LOG_NAME, "a+b")
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            log.close()
            raise DataError(
                f"{printable(folder)}: another process is writing to it (wait for it, or end it)"
            ) from error
        try:
            remove_abandoned(folder)  # temporary files of killed processes
            opened = cls(folder, shard_bytes, log, ["", *_read_reasons(folder / _REASONS_NAME)])
            opened._recover(key, keeps_bad=keeps_bad)
        except BaseException:
            log.close()
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
            self.sync()
            self._shard, self._data_bytes, self._data_crc32, start = self._shard + 1, 0, 0, 0
            self._open_data()
        file = self._data or self._open_data()
        padding = bytes(start - self._data_bytes)
        file.write(padding)
        file.write(sample.data)
        self._data_crc32 = zlib.crc32(sample.data, zlib.crc32(padding, self._data_crc32))
        self._data_bytes = start + len(sample.data)
        self._append_row(sample, start)
        self._pending_bytes += len(sample.data)
        if self._pending_bytes >= _SYNC_BYTES or len(self._rows) >= _SYNC_ROWS:
            self.sync()

    def sync(self) -> None:
        """Write pending samples to disk: data, then reasons, then the rows that refer to both."""
        if not self._rows:
            return
        assert self._data is not None
        fsync_file(self._data)
        if len(self._reasons) > self._num_saved_reasons:
            write_atomic(self.folder / _REASONS_NAME, json.dumps(self._reasons[1:]))
            self._num_saved_reasons = len(self._reasons)
        self._log.write(b"".join(self._rows))
        fsync_file(self._log)
        self._rows.clear()
        self._pending_bytes = 0

    def read_rows(self) -> NDArray[np.void]:
        """Return the rows of all samples, `ROW_DTYPE` [n], mapped."""
        self.sync()
        return np.memmap(
            self.folder / LOG_NAME, dtype=ROW_DTYPE, mode="r", offset=_LOG_HEADER.size, shape=(self.num_done,)
        )

    def truncate(self, num_samples: int) -> None:
        """Discard all but the first `num_samples` samples. Call it before `add`."""
        assert not self._rows
        if num_samples < self.num_done:
            self._resume_after(self._read_log_rows()[:num_samples])

    def get_reason(self, number: int) -> str:
        """Return the text of reason `number`."""
        return self._reasons[number]

    def get_data_path(self, shard: int) -> Path:
        """Return the path of a shard's data file."""
        return self.folder / shard_name(shard)

    def close(self) -> None:
        """Close the files and release the lock. Samples since the last `sync` are lost."""
        for file in (self._data, self._log):
            if file is not None:
                with contextlib.suppress(OSError):  # a full disk, which was reported before
                    file.close()
        self._data = None

    def _append_row(self, sample: EncodedSample, start: int) -> None:
        row = _ROW_STRUCT.pack(
            start, len(sample.data), zlib.crc32(sample.data), sample.label, sample.height, sample.width, sample.kind,
            sample.is_bad, self._get_reason_number(sample.unchanged_reason), self._shard, self._data_crc32,
            sample.file_state, 0,
        )[:-4]  # fmt: skip
        self._rows.append(row + zlib.crc32(row).to_bytes(4, "little"))
        self.num_done += 1

    def _get_reason_number(self, reason: str) -> int:
        if reason not in self._reasons and len(self._reasons) < _MAX_REASONS:
            self._reasons.append(reason if len(self._reasons) < _MAX_REASONS - 1 else _OTHER_REASON)
        return self._reasons.index(reason if reason in self._reasons else _OTHER_REASON)

    def _open_data(self) -> IO[bytes]:
        if self._data is not None:
            self._data.close()
        path = self.get_data_path(self._shard)
        if not self._data_bytes:
            path.unlink(missing_ok=True)  # left by an interrupted run, with no row in the log
        self._data = open_to_write(path, "r+b" if self._data_bytes else "x+b")
        self._data.truncate(HEADER_BYTES + self._data_bytes)
        self._data.seek(HEADER_BYTES + self._data_bytes)
        return self._data

    def _recover(self, key: bytes, *, keeps_bad: bool) -> None:
        self._num_saved_reasons = len(self._reasons)
        self._log.seek(0)
        head = self._log.read(_LOG_HEADER.size)
        expected = _LOG_HEADER.pack(_LOG_MAGIC, key)
        if not _LOG_MAGIC.startswith(head[: len(_LOG_MAGIC)]):
            raise DataError(
                f"{printable(self.folder / LOG_NAME)}: is not a pack's journal (move it away, or write elsewhere)"
            )
        # Fixing an unreadable image may change the source, and so the key: such a pack is started again, not refused.
        if (
            len(head) == _LOG_HEADER.size
            and head != expected
            and (keeps_bad or not self._read_log_rows()["is_bad"].any())
        ):
            raise DataError(
                f"{printable(self.folder)}: is an unfinished pack of another source or with other options (finish "
                f"that one, or remove the folder)"
            )
        if head != expected:  # new, cut short, or discarded
            self._log.truncate(0)
            self._log.write(expected)
            fsync_file(self._log)
        rows = self._read_log_rows()
        if not keeps_bad and rows["is_bad"].any():
            rows = rows[: int(rows["is_bad"].argmax())]
        self._resume_after(rows[: self._count_valid_rows(rows)])

    def _resume_after(self, rows: NDArray[np.void]) -> None:
        """Cut off the log after `rows`, its first ones, and the data after their samples."""
        self.num_done = len(rows)
        self._log.truncate(_LOG_HEADER.size + self.num_done * ROW_DTYPE.itemsize)
        fsync_file(self._log)  # before new data overwrites the samples of the removed rows
        self._shard = self._data_bytes = self._data_crc32 = 0
        if self.num_done:
            last = rows[-1]
            self._shard, self._data_crc32 = int(last["shard"]), int(last["data_crc32"])
            self._data_bytes = int(last["offset"]) + int(last["length"])
        if self.num_done or self._data is not None:
            self._open_data()
        for path in self.folder.glob("data-*.pack"):  # stale later shards, which may not be written again
            if path.name > shard_name(self._shard):
                path.unlink()

    def _read_log_rows(self) -> NDArray[np.void]:
        # Valid or not: see `_count_valid_rows`.
        return np.fromfile(self.folder / LOG_NAME, dtype=ROW_DTYPE, offset=_LOG_HEADER.size)

    def _count_valid_rows(self, rows: NDArray[np.void]) -> int:
        # After a power failure, the log may end with a partial row or with zeros.
        data_sizes: dict[int, int] = {}
        for number, row in enumerate(rows):
            content = row.tobytes()
            if zlib.crc32(content[:-4]) != row["row_crc32"] or row["reason"] >= len(self._reasons):
                return number
            shard = int(row["shard"])
            if shard not in data_sizes:
                data_sizes[shard] = _count_data_bytes(self.get_data_path(shard))
            if int(row["offset"]) + int(row["length"]) > data_sizes[shard]:
                return number
        return len(rows)


def find_foreign_file(folder: Path) -> str:
    """Return the name of an entry of `folder` that is not of a pack, or ""."""
    for path in sorted(folder.iterdir()):
        is_named = _KNOWN_NAMES.fullmatch(path.name) or path.name in (INDEX_NAME, LOG_NAME, _REASONS_NAME)
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


def _read_reasons(path: Path) -> list[str]:
    try:
        reasons: Any = read_json(path)
    except (OSError, ValueError):  # rows that refer to it are invalid then, and their samples are encoded again
        return []
    return [str(each) for each in reasons]


def _count_data_bytes(path: Path) -> int:
    try:
        return path.stat().st_size - HEADER_BYTES
    except OSError:
        return -1
