"""Fetch a file of a pack whole: in pieces, going on where an attempt before was cut off, and proved by checksums."""

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

Outcome = Literal["kept", "busy", "full", "stopped"]
"""What has become of a shard: it is here; another process is fetching it; it does not fit; it was not waited for."""
PIECE_BYTES = 8 << 20
"""Asked for at once: long enough that latency does not count, short enough that little is lost."""
_MEND = "upload it again, or pack it again"


class DamageError(DataError):
    """A file that is other than its checksum says, wherever it was read."""


@dataclass(frozen=True)
class Fetcher:
    """Reads files through `transport`; `stops` ends what is under way between two pieces."""

    transport: Transport
    patience: Patience
    stops: threading.Event = field(default_factory=threading.Event)

    def read(self, address: Address, start: int, stop: int, num_bytes: int) -> bytes:
        """Return bytes [start, stop) of a file of `num_bytes`. Raise `DataError` where it cannot be read."""
        piece = self.patience.read(self.transport, address, start, stop)
        if piece.total != num_bytes:
            raise DamageError(
                f"{address.shown}: has {piece.total:,} bytes, not the {num_bytes:,} of its index "
                f"(it is cut short or of another pack; {_MEND})"
            )
        if len(piece.data) != stop - start:
            raise DamageError(f"{address.shown}: has {num_bytes:,} bytes, and {stop:,} were asked for ({_MEND})")
        return piece.data

    def fetch(self, address: Address, descriptor: int, spans: Iterable[tuple[int, int]], num_bytes: int) -> bool:
        """Write the bytes of `spans` to the same places of an open file; whether it was not stopped."""
        for first, last in spans:
            for start in range(first, last, PIECE_BYTES):
                if self.stops.is_set():
                    return False
                stop = min(start + PIECE_BYTES, last)
                _write(descriptor, self.read(address, start, stop, num_bytes), start)
        return True

    def keep(self, address: Address, file: ShardFile, whole: Path, cache: Cache, *, wait: bool) -> Outcome:
        """Have shard `file` lie whole under the name `whole`, and return whether it does, or why not.

        With `wait`, what another process is fetching is waited for. Raise `DataError` for a shard that cannot be
        fetched, and `DamageError` for one whose checksum is wrong twice.
        """
        part = part_of(whole, file.num_bytes)
        while not whole.exists():
            if self.stops.is_set():
                return "stopped"
            try:
                if not cache.make_room(part, file.num_bytes):
                    return "full"
                lease = take(part, alone=True, wait=wait)
            except OSError:  # the folder cannot be written to, or is gone
                return "full"
            if lease is None:
                return "busy"
            with contextlib.closing(lease):
                if whole.exists():  # another process has just renamed it
                    lease.remove()
                    break
                try:
                    if not self._finish(address, file, lease.descriptor):
                        return "stopped"
                    part.rename(whole)
                except OSError:  # a full disk
                    lease.remove()
                    return "full"
        return "kept"

    def _finish(self, address: Address, file: ShardFile, descriptor: int) -> bool:
        """Fetch what a part lacks, and prove it; one that is wrong is fetched once more from its start."""
        held = os.fstat(descriptor).st_size
        for start in (held if held <= file.num_bytes else 0, 0):
            os.ftruncate(descriptor, start)
            if not self.fetch(address, descriptor, [(start, file.num_bytes)], file.num_bytes):
                return False
            if is_whole(descriptor, file):
                os.fsync(descriptor)
                return True
        os.ftruncate(descriptor, 0)
        raise DamageError(f"{address.shown}: is damaged: its checksum is another than its index says ({_MEND})")


def is_whole(descriptor: int, file: ShardFile) -> bool:
    """Whether an open file is the shard that an index tells of, by size and the CRC-32 of all of it."""
    head = os.pread(descriptor, HEADER_BYTES, 0)
    if os.fstat(descriptor).st_size != file.num_bytes or zlib.crc32(head) != file.header_crc32:
        return False
    header = Header.parsed(head, file.name)
    if _crc32(descriptor, HEADER_BYTES, header.data_bytes) != header.data_crc32:
        return False
    return header.role is not Role.WHOLE or has_index(descriptor, header)


def has_index(descriptor: int, header: Header) -> bool:
    """Whether the index in an open file is the one that its header tells of."""
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
