"""Read the bytes of a pack's samples from its shard files."""

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
from paceline.data.files import OpenFile, printable
from paceline.data.native import load_native

# Size of the header of every file of a pack.
HEADER_BYTES = 128
# Bytes per `pread`; Linux returns at most 2 GiB.
_MAX_READ_BYTES = 1 << 30


# A pack is an index and one or more shards; a pack of one file is its own only shard. Offsets count from the start of
# the shard's file, including its header.
@dataclass(frozen=True)
class ShardFile:
    """A shard as the index describes it."""

    name: str
    num_bytes: int
    header_crc32: int  # identifies the whole file, as the header contains the CRC-32 of the data


class Shards(Protocol):
    """The shards of a pack. Threads and forked processes can share them; unpickling opens them again."""

    def __len__(self) -> int:
        """Number of shards."""
        ...

    def read(self, shard: int, offset: int, length: int) -> bytes:
        """Return `length` bytes of a shard; the GIL is released. Raise `DataError` naming the file."""
        ...

    def memory(self, shard: int) -> memoryview | None:
        """Return a shard's file as read-only mapped memory, valid after `close` too; None if it is not cached."""
        ...

    def array(self, shard: int, offset: int, length: int) -> NDArray[np.uint8]:
        """Return bytes of a shard as uint8 [length]; writing to it changes no file. Raise `DataError` as `read`."""
        ...

    def close(self) -> None:
        """Release descriptors and maps; later calls open them again."""
        ...


@dataclass(frozen=True, eq=False)
class LocalShards:
    """Shards that are files in `folder`, opened on first use. Raise `DataError` if one is truncated while in use."""

    folder: Path
    files: tuple[ShardFile, ...]
    _open: dict[int, OpenFile] = field(default_factory=dict, init=False, repr=False)
    _maps: dict[int, memoryview] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def open_checked(cls, folder: Path, files: Sequence[ShardFile]) -> "LocalShards":
        """Open the shards `files` in `folder`. Raise `DataError` if one is missing, truncated or from another pack."""
        shards = cls(folder, tuple(files))
        for file in shards.files:
            _check_shard(folder / file.name, file)
        return shards

    def __len__(self) -> int:
        return len(self.files)

    def __reduce__(self) -> tuple[Any, ...]:
        return LocalShards, (self.folder, self.files)

    def read(self, shard: int, offset: int, length: int) -> bytes:
        """Return `length` bytes of a shard. Raise `DataError` as `Shards.read`."""
        path = self.folder / self.files[shard].name
        chunks: list[bytes] = []
        try:
            descriptor = self._file(shard).descriptor
            while length:
                chunk = os.pread(descriptor, min(length, _MAX_READ_BYTES), offset)
                if not chunk:
                    raise DataError(f"{printable(path)}: ends before byte {offset:,} (it was truncated; restore it)")
                chunks.append(chunk)
                offset, length = offset + len(chunk), length - len(chunk)
        except OSError as error:
            raise build_read_error(path, error) from error
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def memory(self, shard: int) -> memoryview:
        """Return a shard's file as mapped memory; call `check_mapped_files` after access. Raise as `read`."""
        if shard not in self._maps:
            try:
                file = self.files[shard]
                self._maps[shard] = map_file(self._file(shard).descriptor, file.num_bytes, self.folder / file.name)
            except (OSError, ValueError) as error:
                raise build_read_error(self.folder / self.files[shard].name, error) from error
        return self._maps[shard]

    def array(self, shard: int, offset: int, length: int) -> NDArray[np.uint8]:
        """Return bytes of a shard as a private map, uint8 [length]. Raise as `read`."""
        # Writable, because torch warns about or copies read-only arrays.
        start = offset - offset % mmap.ALLOCATIONGRANULARITY  # mmap accepts no other offsets
        try:
            path, num_bytes = self.folder / self.files[shard].name, offset + length - start
            pages = map_file(self._file(shard).descriptor, num_bytes, path, start=start, is_private=True)
        except (OSError, ValueError) as error:
            raise build_read_error(self.folder / self.files[shard].name, error) from error
        return np.frombuffer(pages, dtype=np.uint8, offset=offset - start, count=length)

    def close(self) -> None:
        """Release files and maps that are not referenced elsewhere."""
        self._open.clear()
        self._maps.clear()

    def _file(self, shard: int) -> OpenFile:
        file = self._open.get(shard)
        if file is None:
            # Another thread may have been first; `setdefault` is atomic.
            file = self._open.setdefault(shard, OpenFile(str(self.folder / self.files[shard].name)))
        return file


def map_file(
    descriptor: int, num_bytes: int, path: Path | None, *, start: int = 0, is_private: bool = False
) -> memoryview:
    """Map `num_bytes` bytes of the file `path` from `start` on; writing to an `is_private` map changes no file.

    Call `check_mapped_files` after reading; it does not report a map without a path. Raise `OSError` or `ValueError`.
    """
    # Beyond the end of a file that was truncated meanwhile, the core's maps read as zeros; access to `mmap`'s ends the
    # process by SIGBUS.
    core = load_native()
    if core is not None:
        return memoryview(core.Mapped(descriptor, num_bytes, os.fsencode(path or ""), start, is_private))
    flags = mmap.MAP_PRIVATE if is_private else mmap.MAP_SHARED
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if is_private else 0)
    return memoryview(mmap.mmap(descriptor, num_bytes, flags=flags, prot=protection, offset=start))


def check_mapped_files() -> None:
    """Raise `DataError` naming a mapped file that was truncated and then accessed by this process."""
    core = load_native()
    name = core.cut_file() if core is not None else None
    if name is not None:
        path = printable(Path(os.fsdecode(name)))
        raise DataError(
            f"{path}: was truncated, or became unreadable, while it was in use (restore it, and add --resume)"
        )


def build_read_error(path: Path, error: OSError | ValueError) -> DataError:
    """Build the error for a file of a pack that cannot be opened, read or mapped."""
    reason = (error.strerror if isinstance(error, OSError) else None) or error
    fix = "restore it or correct the path"
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        fix = "raise the number of open files with ulimit -n, or pack it again with larger shards"
    return DataError(f"{printable(path)}: cannot be read: {reason} ({fix})")


def _check_shard(path: Path, file: ShardFile) -> None:
    try:
        opened = OpenFile(str(path))
        header = os.pread(opened.descriptor, HEADER_BYTES, 0)
    except OSError as error:
        raise build_read_error(path, error) from error
    if opened.num_bytes != file.num_bytes:
        raise DataError(
            f"{printable(path)}: has {count(opened.num_bytes, 'byte')}, not the {file.num_bytes:,} of its index "
            f"(it is truncated or of another pack; copy it again)"
        )
    if zlib.crc32(header) != file.header_crc32:
        raise DataError(f"{printable(path)}: its header does not match the index (copy the whole pack again)")
