"""A pack that is not finished: a folder beside it with the samples so far and a journal of them, which survives a kill.

Samples are appended to data files, and a row of 48 bytes for each to the journal. Now and then the data are forced to
disk and then the rows, so that a row that is there has its sample. Who opens the folder again cuts off what lies behind
the last whole row and goes on there: the finished files are the same bytes, however often that happened. Assembling
them into a pack is in `assemble`.
"""

import contextlib
import errno
import fcntl
import json
import os
import re
import struct
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import DataError
from paceline.core.files import (
    RefusedFileError,
    make_folder,
    open_to_write,
    remove_abandoned,
)
from paceline.core.json_file import read_json
from paceline.core.rundir import write_atomic
from paceline.data.pack.encode import Encoded
from paceline.data.pack.format import ALIGNMENT, INDEX_NAME, KIND_PIXELS, aligned, shard_name
from paceline.data.pack.shards import HEADER_BYTES
from paceline.data.sources.places import printable

JOURNAL_NAME = "journal"
ROW = np.dtype([
    ("offset", "<u8"), ("length", "<u4"), ("crc32", "<u4"), ("label", "<i4"), ("height", "<u2"), ("width", "<u2"),
    ("kind", "u1"), ("is_bad", "u1"), ("reason", "<u2"), ("shard", "<u4"), ("data_crc32", "<u4"), ("mark", "<u8"),
    ("row_crc32", "<u4"),
])  # fmt: skip
"""A sample in the journal: `offset` counts from the start of its shard's data, `data_crc32` is of those up to its end,
`reason` is a number in `reasons.json`, 0 for none, and `mark` is that of what the sample was read from (`marks`)."""
_ROW = struct.Struct("<QIIiHHBBHIIQI")
_HEAD = struct.Struct("<8s32s")
_MAGIC = b"pljournl"
_REASONS_NAME = "reasons.json"
_OURS = re.compile(rf"data-\d{{5,}}\.pack|\.{re.escape(_REASONS_NAME)}\.[0-9a-f]{{16}}\.tmp")
"""Shards, and what a kill leaves of writing the reasons."""
_SAMPLE_ALIGNMENT = 8
_MAX_REASONS, _ANOTHER = 1000, "for yet another reason"
_SYNC_BYTES, _SYNC_ROWS = 64 << 20, 1 << 16
"""What a kill can cost: so much is done again."""
_MAX_LENGTH = (1 << 32) - 1


@dataclass
class Part:
    """The samples so far, and where the next one goes. One process at a time has it."""

    folder: Path
    shard_bytes: int | None
    _journal: IO[bytes]
    _reasons: list[str]
    num_done: int = 0
    _shard: int = 0
    _data_bytes: int = 0
    _data_crc32: int = 0
    _data: IO[bytes] | None = None
    _rows: list[bytes] = field(default_factory=list)
    _waiting_bytes: int = 0
    _known_reasons: int = 0

    @classmethod
    def opened(cls, folder: Path, key: bytes, shard_bytes: int | None, *, keeps_bad: bool = True) -> "Part":
        """Begin a pack in `folder`, or go on with the one there, which must be of the same `key` (32 bytes).

        Unless it `keeps_bad` it goes on from the first image that could not be read, which may have been mended, and
        one of another `key` with such an image is begun anew: it could not be finished, and its source was mended.
        Raise `DataError` where another process has it, where it is of another source or made with other options, and
        where it is another user's or holds anything but an unfinished pack.
        """
        _claim(folder)
        journal = open_to_write(folder / JOURNAL_NAME, "a+b")
        try:
            fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            journal.close()
            raise DataError(
                f"{printable(folder)}: another process is writing there (wait for it, or end it)"
            ) from error
        try:
            remove_abandoned(folder)
            part = cls(folder, shard_bytes, journal, ["", *_read_reasons(folder / _REASONS_NAME)])
            part._recover(key, keeps_bad=keeps_bad)
        except BaseException:
            journal.close()
            raise
        return part

    def add(self, sample: Encoded, *, is_first: bool) -> None:
        """Append a sample; `is_first` of its split, so that pixels begin where numpy likes them to."""
        if len(sample.data) > _MAX_LENGTH:
            raise DataError(f"sample {self.num_done:,}: has {len(sample.data):,} bytes, more than a pack holds (4 GiB)")
        alignment = ALIGNMENT if is_first else 1 if sample.kind == KIND_PIXELS else _SAMPLE_ALIGNMENT
        start = aligned(self._data_bytes, alignment)
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
        self._note(sample, start)
        self._waiting_bytes += len(sample.data)
        if self._waiting_bytes >= _SYNC_BYTES or len(self._rows) >= _SYNC_ROWS:
            self.sync()

    def sync(self) -> None:
        """Force to disk what was added: the samples first, then what is said of them."""
        if not self._rows:
            return
        assert self._data is not None
        _force(self._data)
        if len(self._reasons) > self._known_reasons:
            write_atomic(self.folder / _REASONS_NAME, json.dumps(self._reasons[1:]))
            self._known_reasons = len(self._reasons)
        self._journal.write(b"".join(self._rows))
        _force(self._journal)
        self._rows.clear()
        self._waiting_bytes = 0

    def rows(self) -> NDArray[np.void]:
        """Return what the journal says of all samples, `ROW` [n], mapped."""
        self.sync()
        return np.memmap(self.folder / JOURNAL_NAME, dtype=ROW, mode="r", offset=_HEAD.size, shape=(self.num_done,))

    def cut(self, num_samples: int) -> None:
        """Forget all but the first so many of the samples that were there when this was opened."""
        assert not self._rows
        if num_samples < self.num_done:
            self._go_on_after(self._rows_there()[:num_samples])

    def reason(self, number: int) -> str:
        """Return the words of a reason."""
        return self._reasons[number]

    def data_path(self, shard: int) -> Path:
        """Return where the data of a shard are."""
        return self.folder / shard_name(shard)

    def close(self) -> None:
        """Let go of the files, and of the right to write here. What was added since the last `sync` is lost."""
        for file in (self._data, self._journal):
            if file is not None:
                with contextlib.suppress(OSError):  # of a full disk, which has been told of
                    file.close()
        self._data = None

    def _note(self, sample: Encoded, start: int) -> None:
        row = _ROW.pack(
            start, len(sample.data), zlib.crc32(sample.data), sample.label, sample.height, sample.width, sample.kind,
            sample.is_bad, self._number_of(sample.kept), self._shard, self._data_crc32, sample.mark, 0,
        )[:-4]  # fmt: skip
        self._rows.append(row + zlib.crc32(row).to_bytes(4, "little"))
        self.num_done += 1

    def _number_of(self, reason: str) -> int:
        if reason not in self._reasons and len(self._reasons) < _MAX_REASONS:
            self._reasons.append(reason if len(self._reasons) < _MAX_REASONS - 1 else _ANOTHER)
        return self._reasons.index(reason if reason in self._reasons else _ANOTHER)

    def _open_data(self) -> IO[bytes]:
        """Open the data of this shard, cut to what is known of it."""
        if self._data is not None:
            self._data.close()
        path = self.data_path(self._shard)
        if not self._data_bytes:
            path.unlink(missing_ok=True)
        self._data = open_to_write(path, "r+b" if self._data_bytes else "x+b")
        self._data.truncate(HEADER_BYTES + self._data_bytes)
        self._data.seek(HEADER_BYTES + self._data_bytes)
        return self._data

    def _recover(self, key: bytes, *, keeps_bad: bool) -> None:
        """Read the journal, and cut it to its whole rows; begin it anew where it has none."""
        self._known_reasons = len(self._reasons)
        self._journal.seek(0)
        head = self._journal.read(_HEAD.size)
        wanted = _HEAD.pack(_MAGIC, key)
        if not _MAGIC.startswith(head[: len(_MAGIC)]):
            raise DataError(
                f"{printable(self.folder / JOURNAL_NAME)}: is no journal of a pack (move it away, or write elsewhere)"
            )
        if len(head) == _HEAD.size and head != wanted and (keeps_bad or not self._rows_there()["is_bad"].any()):
            raise DataError(
                f"{printable(self.folder)}: is the beginning of a pack of another source or with other options (finish "
                f"that one, or remove the folder)"
            )
        if head != wanted:
            self._journal.truncate(0)
            self._journal.write(wanted)
            _force(self._journal)
        rows = self._rows_there()
        if not keeps_bad and rows["is_bad"].any():
            rows = rows[: int(rows["is_bad"].argmax())]
        self._go_on_after(rows[: self._num_whole(rows)])

    def _go_on_after(self, rows: NDArray[np.void]) -> None:
        """Cut the journal to `rows`, its first, and the data to theirs."""
        self.num_done = len(rows)
        self._journal.truncate(_HEAD.size + self.num_done * ROW.itemsize)
        _force(self._journal)  # before other data take the place of those that the rows told of
        self._shard = self._data_bytes = self._data_crc32 = 0
        if self.num_done:
            last = rows[-1]
            self._shard, self._data_crc32 = int(last["shard"]), int(last["data_crc32"])
            self._data_bytes = int(last["offset"]) + int(last["length"])
        if self.num_done or self._data is not None:
            self._open_data()
        for path in self.folder.glob("data-*.pack"):  # what follows may be shorter than it was
            if path.name > shard_name(self._shard):
                path.unlink()

    def _rows_there(self) -> NDArray[np.void]:
        """Return the rows of the journal, whole or not, `ROW` [n]."""
        return np.fromfile(self.folder / JOURNAL_NAME, dtype=ROW, offset=_HEAD.size)

    def _num_whole(self, rows: NDArray[np.void]) -> int:
        """Return how many rows are whole and have their sample: all up to the first that is not."""
        held: dict[int, int] = {}
        for number, row in enumerate(rows):
            content = row.tobytes()
            if zlib.crc32(content[:-4]) != row["row_crc32"] or row["reason"] >= len(self._reasons):
                return number
            shard = int(row["shard"])
            if shard not in held:
                held[shard] = _data_bytes(self.data_path(shard))
            if int(row["offset"]) + int(row["length"]) > held[shard]:
                return number
        return len(rows)


def foreign_in(folder: Path) -> str:
    """Return the name of something in `folder` that is no file of a pack, whole or begun; nothing where all are."""
    for path in sorted(folder.iterdir()):
        is_named = _OURS.fullmatch(path.name) or path.name in (INDEX_NAME, JOURNAL_NAME, _REASONS_NAME)
        if not is_named or path.is_symlink() or not path.is_file():
            return path.name
    return ""


def remove_pack(path: Path) -> None:
    """Remove a pack, or the folder of an unfinished one, but nothing else that may lie there. Raise `OSError`."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    if not foreign_in(path):
        for each in list(path.iterdir()):
            each.unlink()
        path.rmdir()


def _claim(folder: Path) -> None:
    """Make the folder, for this user alone, or refuse one that may hold anything but an unfinished pack."""
    try:
        make_folder(folder, 0o700)
    except RefusedFileError as error:
        raise DataError(f"{printable(folder)}: {error.strerror} (remove it, or write elsewhere)") from error
    foreign = foreign_in(folder)
    if foreign:
        raise DataError(
            f"{printable(folder / foreign)}: is no file of an unfinished pack (move it away, or write elsewhere)"
        )


def _read_reasons(path: Path) -> list[str]:
    try:
        found: Any = read_json(path)
    except (OSError, ValueError):  # the rows that need it are then not whole, and are made again
        return []
    return [str(each) for each in found]


def _data_bytes(path: Path) -> int:
    try:
        return path.stat().st_size - HEADER_BYTES
    except OSError:
        return -1


def _force(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def force_folder(folder: Path) -> None:
    """Force the names in a folder to disk. File systems that cannot are left alone."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF):
            raise
    finally:
        os.close(descriptor)
