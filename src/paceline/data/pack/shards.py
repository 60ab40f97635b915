"""Where the bytes of a pack's samples come from. Knows nothing of what they mean.

A pack is an index and one or more shards; a pack of one file is its own only shard. What an index says of each shard is
a `ShardFile`. Offsets count from the start of the shard's file, its header included.
"""

import errno
import mmap
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import DataError
from paceline.core.units import count
from paceline.data.native import native
from paceline.data.sources.places import printable

HEADER_BYTES = 128
"""Every file of a pack begins with a header of this size; the samples of a shard follow it."""
_MOST_AT_ONCE = 1 << 30
"""Bytes asked of the kernel at once; it gives 2 GiB at most."""


@dataclass(frozen=True)
class ShardFile:
    """What the index says of a shard: its name beside the index, its bytes, and the CRC-32 of its header.

    The header holds the CRC-32 of all that follows it (`format.Header.data_crc32`), so that a copy can be proved.
    """

    name: str
    num_bytes: int
    header_crc32: int


class Shards(Protocol):
    """The shards of a pack. Threads may share it; a forked process may go on with it, and a pickled one opens anew."""

    def __len__(self) -> int:
        """How many shards there are."""
        ...

    def read(self, shard: int, offset: int, length: int) -> bytes:
        """Return `length` bytes of a shard, with the GIL released while waiting. Raise `DataError` naming the file."""
        ...

    def memory(self, shard: int) -> memoryview | None:
        """Return all of a shard's file as memory, read-only and mapped, or None where it is not on this machine.

        The memory stands for as long as someone holds it, also after `close`.
        """
        ...

    def array(self, shard: int, offset: int, length: int) -> NDArray[np.uint8]:
        """Return bytes of a shard as uint8 [length] that may be written to, which changes no file.

        They are mapped where the file is on this machine, and read where it is not. Raise `DataError` as `read` does.
        """
        ...

    def close(self) -> None:
        """Give back descriptors and maps. What is asked for afterwards opens them again."""
        ...


class _File:
    """A file that is open for reading, and closed when nobody holds it."""

    def __init__(self, path: Path) -> None:
        self.descriptor = -1
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe must not hang the run

    def __del__(self, close: Any = os.close) -> None:
        if self.descriptor >= 0:
            close(self.descriptor)


@dataclass(frozen=True, eq=False)
class LocalShards:
    """Shards that are files in `folder`, opened when they are first needed.

    Their sizes and headers are compared with the index by `checked`. A shard that is cut short while it is in use is a
    `DataError` of `read`, and of `check_mapped` for whoever has touched `memory` beyond its new end.
    """

    folder: Path
    files: tuple[ShardFile, ...]
    _open: dict[int, _File] = field(default_factory=dict, init=False, repr=False)
    _maps: dict[int, memoryview] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def checked(cls, folder: Path, files: Sequence[ShardFile]) -> "LocalShards":
        """Return the shards `files` in `folder`. Raise `DataError` for one that is missing, cut short or another's."""
        shards = cls(folder, tuple(files))
        for file in shards.files:
            _check(folder / file.name, file)
        return shards

    def __len__(self) -> int:
        return len(self.files)

    def __reduce__(self) -> tuple[Any, ...]:
        return LocalShards, (self.folder, self.files)

    def read(self, shard: int, offset: int, length: int) -> bytes:
        """Return `length` bytes of a shard. Raise `DataError` naming a file that is gone, shorter or unreadable."""
        path = self.folder / self.files[shard].name
        parts: list[bytes] = []
        try:
            descriptor = self._file(shard).descriptor
            while length:
                part = os.pread(descriptor, min(length, _MOST_AT_ONCE), offset)
                if not part:
                    raise DataError(f"{printable(path)}: ends before byte {offset:,} (it was cut short; restore it)")
                parts.append(part)
                offset, length = offset + len(part), length - len(part)
        except OSError as error:
            raise unreadable(path, error) from error
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def memory(self, shard: int) -> memoryview:
        """Return all of a shard's file, mapped. Raise `DataError` as `read` does."""
        if shard not in self._maps:
            try:
                file = self.files[shard]
                self._maps[shard] = mapped(self._file(shard).descriptor, file.num_bytes, self.folder / file.name)
            except (OSError, ValueError) as error:
                raise unreadable(self.folder / self.files[shard].name, error) from error
        return self._maps[shard]

    def array(self, shard: int, offset: int, length: int) -> NDArray[np.uint8]:
        """Return bytes of a shard, mapped so that what is written is nobody else's. Raise `DataError` as `read` does.

        torch takes an array that may be written to without a copy and without a warning.
        """
        start = offset - offset % mmap.ALLOCATIONGRANULARITY
        try:
            path, num_bytes = self.folder / self.files[shard].name, offset + length - start
            pages = mapped(self._file(shard).descriptor, num_bytes, path, start=start, is_private=True)
        except (OSError, ValueError) as error:
            raise unreadable(self.folder / self.files[shard].name, error) from error
        return np.frombuffer(pages, dtype=np.uint8, offset=offset - start, count=length)

    def close(self) -> None:
        """Let go of all files and maps; what others still hold closes with them."""
        self._open.clear()
        self._maps.clear()

    def _file(self, shard: int) -> _File:
        file = self._open.get(shard)
        if file is None:
            file = self._open.setdefault(shard, _File(self.folder / self.files[shard].name))
        return file


def mapped(descriptor: int, num_bytes: int, path: Path, *, start: int = 0, is_private: bool = False) -> memoryview:
    """Return `num_bytes` bytes of the file `path` from `start` on, mapped. Raise `OSError` or `ValueError`.

    What is written with `is_private` changes no file. Call `check_mapped` before what was read is used: beyond the end
    of a file that is cut short meanwhile there are zeros. Without the native core that is SIGBUS.
    """
    core = native()
    if core is not None:
        return memoryview(core.Mapped(descriptor, num_bytes, os.fsencode(path), start, is_private))
    flags = mmap.MAP_PRIVATE if is_private else mmap.MAP_SHARED
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if is_private else 0)
    return memoryview(mmap.mmap(descriptor, num_bytes, flags=flags, prot=protection, offset=start))


def check_mapped() -> None:
    """Raise `DataError` naming a file that was cut short while this process had it mapped, and touched."""
    core = native()
    name = core.cut_file() if core is not None else None
    if name is not None:
        path = printable(Path(os.fsdecode(name)))
        raise DataError(f"{path}: was cut short, or cannot be read, while it was in use (restore it, and add --resume)")


def unreadable(path: Path, error: OSError | ValueError) -> DataError:
    """Return the error of a file of a pack that cannot be opened, read or mapped."""
    reason = (error.strerror if isinstance(error, OSError) else None) or error
    fix = "restore it or correct the path"
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        fix = "raise the number of open files with ulimit -n, or pack it again with larger shards"
    return DataError(f"{printable(path)}: cannot be read: {reason} ({fix})")


def _check(path: Path, file: ShardFile) -> None:
    try:
        opened = _File(path)
        num_bytes = os.fstat(opened.descriptor).st_size
        header = os.pread(opened.descriptor, HEADER_BYTES, 0)
    except OSError as error:
        raise unreadable(path, error) from error
    if num_bytes != file.num_bytes:
        raise DataError(
            f"{printable(path)}: has {count(num_bytes, 'byte')}, not the {file.num_bytes:,} of its index "
            f"(it is cut short or of another pack; copy it again)"
        )
    if zlib.crc32(header) != file.header_crc32:
        raise DataError(f"{printable(path)}: has another header than its index says (copy the whole pack again)")
