"""Cache shards of remote packs in a folder that processes and runs share, and fetch them in the background."""

import contextlib
import os
import shutil
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Literal

from paceline.core.errors import DataError
from paceline.core.files import make_folder, open_lock_file
from paceline.data.file_lock import FileLock, acquire_file_lock
from paceline.data.files import printable
from paceline.data.pack.format import FileRole, PackHeader
from paceline.data.pack.shards import HEADER_BYTES, ShardFile
from paceline.data.remote.transport import RemoteUrl, RetryPolicy, Transport

# Bytes per request: large enough to hide latency, small enough to lose little on an error.
CHUNK_BYTES = 8 << 20
NUM_FETCH_THREADS = 4
# Result of fetching a shard: in the cache; being fetched by another process; does not fit; interrupted.
FetchOutcome = Literal["cached", "busy", "full", "stopped"]
_PARTIAL_SUFFIX = ".part"
_REUPLOAD_FIX = "upload it again, or pack it again"


# `DIGEST/` is a pack, named by the digest of its URL and header. It holds the index and `shards/`, in which an
# incomplete shard is called `NAME.BYTES.part`. Every user of the pack holds `DIGEST.lock` shared, and `room.lock` is
# held during eviction. Only packs that nobody uses are evicted, least recently opened shards first.
@dataclass(frozen=True)
class ShardCache:
    """The cache in `folder`, limited to `max_bytes`."""

    folder: Path
    max_bytes: int

    def acquire(self, digest: str) -> FileLock:
        """Create a pack's folder and lock it against eviction. Raise `DataError` if that fails."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = acquire_file_lock(_lock_path(self.folder / digest), is_exclusive=False, should_wait=True)
            make_folder(self.folder / digest)
            make_folder(self.get_shard_folder(digest))
        except OSError as error:
            reason = error.strerror or error
            raise DataError(f"data.source.cache: {printable(self.folder)}: {reason} (name another folder)") from error
        assert lock is not None, "`should_wait` is set"
        return lock

    def get_shard_folder(self, digest: str) -> Path:
        """Return the folder of a pack's complete and partial shards."""
        return self.folder / digest / "shards"

    def reserve(self, partial: Path, num_bytes: int) -> bool:
        """Reserve `num_bytes` for the file `partial`, evicting shards if necessary; return False if they do not fit.

        Raise `OSError` if the folder is not writable.
        """
        if partial.exists():
            return True
        with contextlib.closing(self._lock_exclusively()):
            excess = self._count_used_bytes() + num_bytes - self.max_bytes
            excess = max(excess, num_bytes - shutil.disk_usage(self.folder).free)
            if excess > 0 and not self._evict(excess):
                return False
            partial.parent.mkdir(parents=True, exist_ok=True)
            os.close(open_lock_file(partial))  # the empty file is the reservation: its name has the final size
        return True

    def _lock_exclusively(self) -> FileLock:
        lock = acquire_file_lock(self.folder / "room.lock", is_exclusive=True, should_wait=True)
        assert lock is not None, "`should_wait` is set"
        return lock

    def _count_used_bytes(self) -> int:
        # Keyed by final name, as a file may be renamed between listing and `stat`.
        sizes: dict[tuple[Path, str], int] = {}
        for path in (path for folder in self._iter_packs() for path in folder.glob("**/*")):
            if path.name.endswith(_PARTIAL_SUFFIX):
                sizes[path.parent, path.name.removesuffix(_PARTIAL_SUFFIX).rpartition(".")[0]] = _get_file_bytes(path)
            elif path.is_file():
                sizes.setdefault((path.parent, path.name), _get_file_bytes(path))
        return sum(sizes.values())

    def _iter_packs(self) -> Iterator[Path]:
        folders = (path for path in self.folder.iterdir() if path.is_dir() and not path.is_symlink())
        # Folders without a lock are not the cache's.
        return (path for path in folders if _lock_path(path).is_file())

    def _evict(self, num_bytes: int) -> bool:
        """Evict shards of unused packs; return whether `num_bytes` were freed."""
        # The locks are held until the end, so that no process opens a pack that is being evicted.
        with contextlib.ExitStack() as locks:
            unused = {}
            for folder in self._iter_packs():
                lock = acquire_file_lock(_lock_path(folder), is_exclusive=True, should_wait=False)
                if lock is not None:
                    locks.callback(lock.close)
                    unused[folder] = lock
            shards = [path for folder in unused for path in (folder / "shards").glob("*")]
            if sum(_get_file_bytes(path) for path in shards) < num_bytes:
                return False  # evict nothing if it would not suffice
            freed, emptied = 0, set()
            for path in sorted(shards, key=_get_last_used_ns):
                if freed >= num_bytes:
                    break
                freed += _get_file_bytes(path)
                path.unlink()
                emptied.add(path.parent.parent)
            for folder in emptied:
                if not any((folder / "shards").glob("*")):
                    shutil.rmtree(folder, ignore_errors=True)
                    unused[folder].remove()
        return True


def _lock_path(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")


def _get_last_used_ns(shard: Path) -> int:
    return shard.stat().st_mtime_ns  # `RemoteShards` updates it on opening


def partial_path(target: Path, num_bytes: int) -> Path:
    """Return the path of a shard of `num_bytes` while it is incomplete."""
    return target.with_name(f"{target.name}.{num_bytes}{_PARTIAL_SUFFIX}")


def _get_file_bytes(path: Path) -> int:
    # An incomplete file counts with its final size.
    with contextlib.suppress(ValueError):
        if path.name.endswith(_PARTIAL_SUFFIX):
            return int(path.name.removesuffix(_PARTIAL_SUFFIX).rpartition(".")[2])
    with contextlib.suppress(FileNotFoundError):  # renamed or evicted by another process meanwhile
        status = path.stat()
        return min(status.st_size, status.st_blocks * 512)  # the index of a one-file pack is mostly a hole
    return 0


class CorruptFileError(DataError):
    """A remote file that does not match its checksum or size."""


@dataclass(frozen=True)
class Fetcher:
    """Read files through `transport`; `stop` interrupts a download between two chunks."""

    transport: Transport
    retry: RetryPolicy
    stop: threading.Event = field(default_factory=threading.Event)

    def read(self, address: RemoteUrl, start: int, stop: int, num_bytes: int) -> bytes:
        """Return bytes [start, stop) of a file. Raise `DataError`; `CorruptFileError` if its size differs."""
        chunk = self.retry.read(self.transport, address, start, stop)
        if chunk.total != num_bytes:
            raise CorruptFileError(
                f"{address.display_url}: has {chunk.total:,} bytes, not the {num_bytes:,} of its index "
                f"(it is truncated or of another pack; {_REUPLOAD_FIX})"
            )
        if len(chunk.data) != stop - start:
            raise CorruptFileError(
                f"{address.display_url}: has {num_bytes:,} bytes, and {stop:,} were requested ({_REUPLOAD_FIX})"
            )
        return chunk.data

    def fetch_ranges(
        self, address: RemoteUrl, descriptor: int, spans: Iterable[tuple[int, int]], num_bytes: int
    ) -> bool:
        """Copy the byte ranges `spans` to the same offsets of an open file; return False if interrupted."""
        for first, last in spans:
            for start in range(first, last, CHUNK_BYTES):
                if self.stop.is_set():
                    return False
                stop = min(start + CHUNK_BYTES, last)
                _write_at(descriptor, self.read(address, start, stop, num_bytes), start)
        return True

    def fetch_shard(
        self, address: RemoteUrl, file: ShardFile, target: Path, cache: ShardCache, *, wait: bool
    ) -> FetchOutcome:
        """Download shard `file` to `target` unless it exists; `wait` waits for a download by another process.

        Raise `DataError` if it cannot be downloaded, and `CorruptFileError` if its checksum is wrong twice.
        """
        partial = partial_path(target, file.num_bytes)
        while not target.exists():
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
                if target.exists():  # another process has just completed it
                    lock.remove()
                    break
                try:
                    if not self._complete_partial(address, file, lock.descriptor):
                        return "stopped"  # the partial file stays, and the next run continues it
                    partial.rename(target)
                except OSError:  # a full disk
                    lock.remove()
                    return "full"
        return "cached"

    def _complete_partial(self, address: RemoteUrl, file: ShardFile, descriptor: int) -> bool:
        num_present = os.fstat(descriptor).st_size
        # Bytes that an earlier download has left may be damaged, so the second attempt starts at 0.
        for start in (num_present if num_present <= file.num_bytes else 0, 0):
            os.ftruncate(descriptor, start)
            if not self.fetch_ranges(address, descriptor, [(start, file.num_bytes)], file.num_bytes):
                return False
            if is_complete(descriptor, file):
                os.fsync(descriptor)  # before the rename: after a power failure, the final name implies the content
                return True
        os.ftruncate(descriptor, 0)
        raise CorruptFileError(
            f"{address.display_url}: is damaged: its checksum does not match the index ({_REUPLOAD_FIX})"
        )


def is_complete(descriptor: int, file: ShardFile) -> bool:
    """Return whether an open file is the complete shard `file`, by size and checksums."""
    head = os.pread(descriptor, HEADER_BYTES, 0)
    if os.fstat(descriptor).st_size != file.num_bytes or zlib.crc32(head) != file.header_crc32:
        return False
    header = PackHeader.from_bytes(head, file.name)
    if _compute_crc32(descriptor, HEADER_BYTES, header.data_bytes) != header.data_crc32:
        return False
    return header.role is not FileRole.WHOLE or has_valid_index(descriptor, header)


def has_valid_index(descriptor: int, header: PackHeader) -> bool:
    """Return whether the CRC-32 of the index in an open file is its header's."""
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


class ShardPrefetcher:
    """Call `fetch_shard` in threads for requested shards. A shard that does not fit is not retried."""

    def __init__(self, fetch_shard: Callable[[int], FetchOutcome]) -> None:
        self._fetch_shard = fetch_shard
        self._lock = threading.Lock()
        self._queue: SimpleQueue[int | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._requested: set[int] = set()
        self._faults: dict[int, CorruptFileError] = {}

    def request(self, shard: int) -> None:
        """Queue a shard unless it is queued or too large. Raise the `CorruptFileError` of an earlier attempt."""
        if shard in self._faults:
            raise self._faults[shard]
        with self._lock:
            if shard in self._requested:
                return
            self._requested.add(shard)
            if len(self._threads) < min(NUM_FETCH_THREADS, len(self._requested)):
                thread = threading.Thread(target=self._run, name=f"fetch-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()
        self._queue.put(shard)

    def stop(self) -> None:
        """Stop the threads after the shards requested so far, without waiting."""
        with self._lock:
            threads = [*self._threads]
            self._threads.clear()
        for _ in threads:
            self._queue.put(None)

    def _run(self) -> None:
        while (shard := self._queue.get()) is not None:
            try:
                outcome = self._fetch_shard(shard)
            except CorruptFileError as error:
                self._faults[shard] = error
                continue
            except DataError:  # dropped: reading the shard raises it too
                outcome = "busy"
            if outcome != "full":  # the next request tries again
                with self._lock:
                    self._requested.discard(shard)
