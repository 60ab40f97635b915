"""Download files of a pack in pieces, resuming earlier attempts, and verify their checksums."""

import contextlib
import os
import threading
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from paceline.core.errors import DataError
from paceline.data.lease import take
from paceline.data.pack.format import Header, Role
from paceline.data.pack.shards import HEADER_BYTES, ShardFile
from paceline.data.remote.address import Address
from paceline.data.remote.cache import Cache, part_of
from paceline.data.remote.patience import Patience
from paceline.data.remote.transport import Transport

# Result of fetching a shard: in the cache; being fetched by another process; does not fit; interrupted.
Outcome = Literal["kept", "busy", "full", "stopped"]
# Bytes per request: large enough to hide latency, small enough to lose little on an error.
PIECE_BYTES = 8 << 20
_MEND = "upload it again, or pack it again"


class DamageError(DataError):
    """A remote file that does not match its checksum or size."""


@dataclass(frozen=True)
class Fetcher:
    """Read files through `transport`; `stops` interrupts a download between two pieces."""

    transport: Transport
    patience: Patience
    stops: threading.Event = field(default_factory=threading.Event)

    def read(self, address: Address, start: int, stop: int, num_bytes: int) -> bytes:
        """Return bytes [start, stop) of a file of `num_bytes`. Raise `DataError` if they cannot be read."""
        piece = self.patience.read(self.transport, address, start, stop)
        if piece.total != num_bytes:
            raise DamageError(
                f"{address.shown}: has {piece.total:,} bytes, not the {num_bytes:,} of its index "
                f"(it is truncated or of another pack; {_MEND})"
            )
        if len(piece.data) != stop - start:
            raise DamageError(f"{address.shown}: has {num_bytes:,} bytes, and {stop:,} were asked for ({_MEND})")
        return piece.data

    def fetch(self, address: Address, descriptor: int, spans: Iterable[tuple[int, int]], num_bytes: int) -> bool:
        """Write the bytes of `spans` to the same positions of an open file; return False if interrupted."""
        for first, last in spans:
            for start in range(first, last, PIECE_BYTES):
                if self.stops.is_set():
                    return False
                stop = min(start + PIECE_BYTES, last)
                _write(descriptor, self.read(address, start, stop, num_bytes), start)
        return True

    def keep(self, address: Address, file: ShardFile, whole: Path, cache: Cache, *, wait: bool) -> Outcome:
        """Download shard `file` to the path `whole` unless it exists; return the outcome.

        With `wait`, wait for a download by another process. Raise `DataError` if the shard cannot be downloaded, and
        `DamageError` if its checksum is wrong twice.
        """
        partial = part_of(whole, file.num_bytes)
        while not whole.exists():
            if self.stops.is_set():
                return "stopped"
            try:
                if not cache.make_room(partial, file.num_bytes):
                    return "full"
                lock = take(partial, alone=True, wait=wait)
            except OSError:  # the folder is not writable or was removed
                return "full"
            if lock is None:
                return "busy"
            with contextlib.closing(lock):
                if whole.exists():  # another process has just completed it
                    lock.remove()
                    break
                try:
                    if not self._finish(address, file, lock.descriptor):
                        return "stopped"
                    partial.rename(whole)
                except OSError:  # a full disk
                    lock.remove()
                    return "full"
        return "kept"

    def _finish(self, address: Address, file: ShardFile, descriptor: int) -> bool:
        """Download the rest of a partial shard and verify it; if that fails, download it once from the start."""
        num_present = os.fstat(descriptor).st_size
        for start in (num_present if num_present <= file.num_bytes else 0, 0):
            os.ftruncate(descriptor, start)
            if not self.fetch(address, descriptor, [(start, file.num_bytes)], file.num_bytes):
                return False
            if is_whole(descriptor, file):
                os.fsync(descriptor)
                return True
        os.ftruncate(descriptor, 0)
        raise DamageError(f"{address.shown}: is damaged: its checksum does not match the index ({_MEND})")


def is_whole(descriptor: int, file: ShardFile) -> bool:
    """Return whether an open file is the complete shard `file`, by size and CRC-32."""
    head = os.pread(descriptor, HEADER_BYTES, 0)
    if os.fstat(descriptor).st_size != file.num_bytes or zlib.crc32(head) != file.header_crc32:
        return False
    header = Header.parsed(head, file.name)
    if _crc32(descriptor, HEADER_BYTES, header.data_bytes) != header.data_crc32:
        return False
    return header.role is not Role.WHOLE or has_index(descriptor, header)


def has_index(descriptor: int, header: Header) -> bool:
    """Return whether the index in an open file matches its header's CRC-32."""
    return _crc32(descriptor, header.index_offset, header.index_bytes) == header.index_crc32


def _crc32(descriptor: int, start: int, length: int) -> int:
    crc32 = 0
    while length:
        data = os.pread(descriptor, min(length, 1 << 20), start)
        if not data:
            break
        crc32, start, length = zlib.crc32(data, crc32), start + len(data), length - len(data)
    return crc32


def _write(descriptor: int, data: bytes, start: int) -> None:
    written = 0
    while written < len(data):
        written += os.pwrite(descriptor, memoryview(data)[written:], start + written)
