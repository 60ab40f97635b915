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
from paceline.data.lease import acquire_file_lock
from paceline.data.pack.format import FileRole, PackHeader
from paceline.data.pack.shards import HEADER_BYTES, ShardFile
from paceline.data.remote.address import RemoteUrl
from paceline.data.remote.cache import ShardCache, partial_path
from paceline.data.remote.patience import RetryPolicy
from paceline.data.remote.transport import Transport

# Result of fetching a shard: in the cache; being fetched by another process; does not fit; interrupted.
FetchOutcome = Literal["kept", "busy", "full", "stopped"]
# Bytes per request: large enough to hide latency, small enough to lose little on an error.
PIECE_BYTES = 8 << 20
_REUPLOAD_FIX = "upload it again, or pack it again"


class CorruptFileError(DataError):
    """A remote file that does not match its checksum or size."""


@dataclass(frozen=True)
class Fetcher:
    """Read files through `transport`; `stop` interrupts a download between two pieces."""

    transport: Transport
    retry: RetryPolicy
    stop: threading.Event = field(default_factory=threading.Event)

    def read(self, address: RemoteUrl, start: int, stop: int, num_bytes: int) -> bytes:
        """Return bytes [start, stop) of a file of `num_bytes`. Raise `DataError` if they cannot be read."""
        piece = self.retry.read(self.transport, address, start, stop)
        if piece.total != num_bytes:
            raise CorruptFileError(
                f"{address.display_url}: has {piece.total:,} bytes, not the {num_bytes:,} of its index "
                f"(it is truncated or of another pack; {_REUPLOAD_FIX})"
            )
        if len(piece.data) != stop - start:
            raise CorruptFileError(
                f"{address.display_url}: has {num_bytes:,} bytes, and {stop:,} were asked for ({_REUPLOAD_FIX})"
            )
        return piece.data

    def fetch_ranges(
        self, address: RemoteUrl, descriptor: int, spans: Iterable[tuple[int, int]], num_bytes: int
    ) -> bool:
        """Write the bytes of `spans` to the same positions of an open file; return False if interrupted."""
        for first, last in spans:
            for start in range(first, last, PIECE_BYTES):
                if self.stop.is_set():
                    return False
                stop = min(start + PIECE_BYTES, last)
                _write_at(descriptor, self.read(address, start, stop, num_bytes), start)
        return True

    def fetch_shard(
        self, address: RemoteUrl, file: ShardFile, whole: Path, cache: ShardCache, *, wait: bool
    ) -> FetchOutcome:
        """Download shard `file` to the path `whole` unless it exists; return the outcome.

        With `wait`, wait for a download by another process. Raise `DataError` if the shard cannot be downloaded, and
        `CorruptFileError` if its checksum is wrong twice.
        """
        partial = partial_path(whole, file.num_bytes)
        while not whole.exists():
            if self.stop.is_set():
                return "stopped"
            try:
                if not cache.reserve(partial, file.num_bytes):
                    return "full"
                lock = acquire_file_lock(partial, is_exclusive=True, should_wait=wait)
            except OSError:  # the folder is not writable or was removed
                return "full"
            if lock is None:
                return "busy"
            with contextlib.closing(lock):
                if whole.exists():  # another process has just completed it
                    lock.remove()
                    break
                try:
                    if not self._complete_partial(address, file, lock.descriptor):
                        return "stopped"
                    partial.rename(whole)
                except OSError:  # a full disk
                    lock.remove()
                    return "full"
        return "kept"

    def _complete_partial(self, address: RemoteUrl, file: ShardFile, descriptor: int) -> bool:
        """Download the rest of a partial shard and verify it; if that fails, download it once from the start."""
        num_present = os.fstat(descriptor).st_size
        for start in (num_present if num_present <= file.num_bytes else 0, 0):
            os.ftruncate(descriptor, start)
            if not self.fetch_ranges(address, descriptor, [(start, file.num_bytes)], file.num_bytes):
                return False
            if is_complete(descriptor, file):
                os.fsync(descriptor)
                return True
        os.ftruncate(descriptor, 0)
        raise CorruptFileError(
            f"{address.display_url}: is damaged: its checksum does not match the index ({_REUPLOAD_FIX})"
        )


def is_complete(descriptor: int, file: ShardFile) -> bool:
    """Return whether an open file is the complete shard `file`, by size and CRC-32."""
    head = os.pread(descriptor, HEADER_BYTES, 0)
    if os.fstat(descriptor).st_size != file.num_bytes or zlib.crc32(head) != file.header_crc32:
        return False
    header = PackHeader.from_bytes(head, file.name)
    if _compute_crc32(descriptor, HEADER_BYTES, header.data_bytes) != header.data_crc32:
        return False
    return header.role is not FileRole.WHOLE or has_valid_index(descriptor, header)


def has_valid_index(descriptor: int, header: PackHeader) -> bool:
    """Return whether the index in an open file matches its header's CRC-32."""
    return _compute_crc32(descriptor, header.index_offset, header.index_bytes) == header.index_crc32


def _compute_crc32(descriptor: int, start: int, length: int) -> int:
    crc32 = 0
    while length:
        data = os.pread(descriptor, min(length, 1 << 20), start)
        if not data:
            break
        crc32, start, length = zlib.crc32(data, crc32), start + len(data), length - len(data)
    return crc32


def _write_at(descriptor: int, data: bytes, start: int) -> None:
    written = 0
    while written < len(data):
        written += os.pwrite(descriptor, memoryview(data)[written:], start + written)
