"""Open a pack behind a URL and read its shards from the cache or by range."""

import contextlib
import hashlib
import os
import shutil
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from paceline.core.dataset import Datasets
from paceline.core.errors import DataError
from paceline.core.urls import HOW_TO_PASS_CREDENTIALS, find_secret, public_url
from paceline.data.file_lock import FileLock, acquire_file_lock
from paceline.data.files import printable
from paceline.data.pack.format import ALIGNMENT, INDEX_NAME, FileRole, IndexLayout, IndexSizes, PackHeader
from paceline.data.pack.index import open_index
from paceline.data.pack.reader import build_pack_datasets
from paceline.data.pack.shards import HEADER_BYTES, LocalShards, ShardFile
from paceline.data.remote.cache import CHUNK_BYTES, Fetcher, FetchOutcome, ShardCache, ShardPrefetcher, has_valid_index
from paceline.data.remote.http import HttpTransport
from paceline.data.remote.transport import HTTP_SCHEMES, FsspecTransport, RemoteUrl, RetryPolicy, Transport

# An index up to this size, of about a million samples, may exceed the limit of the cache.
_SMALL_INDEX_BYTES: Final = 64 << 20


@dataclass(frozen=True, eq=False)
class _ProcessState:
    """Threads, lock and connections of one process, none of which survives a fork."""

    fetcher: Fetcher
    prefetcher: ShardPrefetcher
    lock: FileLock
    pid: int

    def close(self) -> None:
        """Release all without waiting for downloads; do nothing in a forked child, as the parent still uses them."""
        if self.pid != os.getpid():
            return
        self.fetcher.stop.set()
        self.prefetcher.stop()
        self.fetcher.transport.close()
        self.lock.close()


# No reference to `RemoteShards`, so that the threads do not keep it from being garbage-collected.
@dataclass(frozen=True, eq=False)
class _ShardFetcher:
    addresses: tuple[RemoteUrl, ...]
    files: tuple[ShardFile, ...]
    cache: ShardCache
    folder: Path

    def __call__(self, fetcher: Fetcher, shard: int, *, wait: bool) -> FetchOutcome:
        file = self.files[shard]
        return fetcher.fetch_shard(self.addresses[shard], file, self.folder / file.name, self.cache, wait=wait)


# Training starts at once: a sample is read by range, which also requests its shard. The caller verifies such samples; a
# shard is verified when it is fetched.
@dataclass(frozen=True, eq=False)
class RemoteShards:
    """Shards `files` at `addresses`, cached in `cache` under `digest`; `connect` creates a process's transport."""

    addresses: tuple[RemoteUrl, ...]
    files: tuple[ShardFile, ...]
    cache: ShardCache
    digest: str
    connect: Callable[[], Transport]
    retry: RetryPolicy
    _cached: set[int] = field(default_factory=set, init=False, repr=False)
    _processes: dict[int, _ProcessState] = field(default_factory=dict, init=False, repr=False)
    _local: LocalShards = field(init=False, repr=False)
    _fetch_shard: _ShardFetcher = field(init=False, repr=False)

    def __post_init__(self) -> None:
        folder = self.cache.get_shard_folder(self.digest)
        object.__setattr__(self, "_local", LocalShards(folder, self.files))
        object.__setattr__(self, "_fetch_shard", _ShardFetcher(self.addresses, self.files, self.cache, folder))

    def __len__(self) -> int:
        return len(self.files)

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteShards, (self.addresses, self.files, self.cache, self.digest, self.connect, self.retry)

    def acquire_lock(self) -> Self:
        """Lock the pack's cache against eviction and return this object."""
        self._get_process_state()
        return self

    def read(self, shard: int, offset: int, length: int) -> bytes:
        """Return `length` bytes of a shard. Raise `DataError` naming the URL."""
        if self._is_cached(shard):
            return self._local.read(shard, offset, length)
        state = self._get_process_state()
        state.prefetcher.request(shard)
        file = self.files[shard]
        return state.fetcher.read(self.addresses[shard], offset, offset + length, file.num_bytes)

    def memory(self, shard: int) -> memoryview | None:
        """Return a shard's file as mapped memory; if it is not cached yet, request it and return None."""
        if self._is_cached(shard):
            return self._local.memory(shard)
        self._get_process_state().prefetcher.request(shard)
        return None

    def array(self, shard: int, offset: int, length: int) -> NDArray[np.uint8]:
        """Download a shard and return some of its bytes as writable uint8 [length], mapped if the shard fits."""
        state = self._get_process_state()
        if self._is_cached(shard) or self._fetch_shard(state.fetcher, shard, wait=True) == "cached":
            return self._local.array(shard, offset, length)
        pixels = np.empty(length, dtype=np.uint8)
        for start in range(0, length, CHUNK_BYTES):
            stop = min(start + CHUNK_BYTES, length)
            pixels[start:stop] = np.frombuffer(self.read(shard, offset + start, stop - start), dtype=np.uint8)
        return pixels

    def close(self) -> None:
        """Stop downloads, and release connections, descriptors, maps and the lock."""
        process = self._processes.pop(os.getpid(), None)
        if process is not None:
            process.close()
        self._local.close()

    def _is_cached(self, shard: int) -> bool:
        if shard in self._cached:
            return True
        path = self._local.folder / self.files[shard].name
        if not path.exists():
            return False
        self._get_process_state()  # takes the lock against eviction
        with contextlib.suppress(OSError):
            os.utime(path)  # for LRU eviction
        self._cached.add(shard)
        return True

    def _get_process_state(self) -> _ProcessState:
        process = self._processes.get(os.getpid())  # by pid: a forked process must not use its parent's state
        if process is None:
            fetcher = Fetcher(self.connect(), self.retry)
            prefetcher = ShardPrefetcher(partial(self._fetch_shard, fetcher, wait=False))
            new = _ProcessState(fetcher, prefetcher, self.cache.acquire(self.digest), os.getpid())
            process = self._processes.setdefault(os.getpid(), new)
            if process is new:
                weakref.finalize(self, new.close)
            else:  # another thread was first
                new.close()
        return process


def open_remote(root: str, cache: Path, cache_bytes: int, retry: RetryPolicy | None = None) -> Datasets:
    """Open the splits of the pack behind the URL `root`, a file that ends with `.pack` or a folder of shards.

    `cache` holds the index and up to `cache_bytes` of shards. Raise `DataError` naming the URL if it is not a pack,
    contains a password or a query, or cannot be read.
    """
    secret = find_secret(root, any_query=True)
    if secret:
        raise DataError(f"{printable(public_url(root))}: the URL holds {secret} ({HOW_TO_PASS_CREDENTIALS})")
    address, retry = RemoteUrl(root), retry or RetryPolicy()
    if not address.file_name.endswith(".pack"):
        address = address.join(INDEX_NAME)
    connect: Callable[[], Transport] = HttpTransport if address.parts.scheme in HTTP_SCHEMES else FsspecTransport
    with contextlib.closing(connect()) as transport:
        start = retry.read(transport, address, 0, HEADER_BYTES)
        header = PackHeader.from_bytes(start.data, address.display_url)
        if header.role is FileRole.SHARD:
            raise DataError(f"{address.display_url}: is a shard of a pack (name the folder that it lies in)")
        # A changed pack has another header. The URL is included, as another server may send this header with a forged
        # index.
        digest = hashlib.sha256(f"{address.url_path}\n".encode() + start.data).hexdigest()[:16]
        shard_cache = ShardCache(cache.expanduser().absolute(), cache_bytes)
        with contextlib.closing(shard_cache.acquire(digest)):
            path = shard_cache.folder / digest / INDEX_NAME
            _fetch_index(Fetcher(transport, retry), address, header, path, cache_bytes)
            index = open_index(path, address.display_url)
            is_whole = header.role is FileRole.WHOLE
            addresses = tuple(address if is_whole else address.sibling(file.name) for file in index.files)
            # The shards take their own lock before this one is released, so nothing is evicted in between.
            return build_pack_datasets(
                index, RemoteShards(addresses, index.files, shard_cache, digest, connect, retry).acquire_lock()
            )


def _fetch_index(fetcher: Fetcher, address: RemoteUrl, header: PackHeader, index: Path, cache_bytes: int) -> None:
    partial = index.with_suffix(".part")
    try:
        while not index.exists():
            lock = acquire_file_lock(partial, is_exclusive=True, should_wait=True)
            assert lock is not None, "`should_wait` is set"
            with contextlib.closing(lock):
                if index.exists():
                    lock.remove()
                    break
                _check_index_size(fetcher, address, header, index.parent, cache_bytes)
                os.ftruncate(lock.descriptor, 0)
                # The data between them become a hole, as the offsets must stay those of the whole file.
                spans = [(0, HEADER_BYTES), (header.index_offset, header.num_bytes)]
                fetcher.fetch_ranges(address, lock.descriptor, spans, header.num_bytes)
                if not has_valid_index(lock.descriptor, header):
                    raise DataError(f"{address.display_url}: its index is damaged (upload it again, or pack it again)")
                os.fsync(lock.descriptor)
                partial.rename(index)
    except OSError as error:
        raise DataError(f"data.source.cache: {printable(index)}: {error.strerror} (name another folder)") from error


def _check_index_size(fetcher: Fetcher, address: RemoteUrl, header: PackHeader, folder: Path, cache_bytes: int) -> None:
    """Raise `DataError` if the index is inconsistent, or too large for the cache or the disk."""
    url, num_bytes = address.display_url, header.index_bytes
    first = header.index_offset
    if num_bytes < ALIGNMENT:
        raise DataError(f"{url}: its index is damaged (upload it again, or pack it again)")
    # Its first bytes determine its size, so an inconsistent header is found before the rest is fetched.
    sizes = IndexSizes.from_bytes(fetcher.read(address, first, first + ALIGNMENT, header.num_bytes))
    if IndexLayout.from_sizes(sizes).num_bytes != num_bytes:
        samples = sum(sizes.samples)
        raise DataError(
            f"{url}: its index is inconsistent: {num_bytes:,} bytes for {samples:,} samples (upload it again, or pack "
            f"it again)"
        )
    if num_bytes > max(cache_bytes, _SMALL_INDEX_BYTES):
        raise DataError(
            f"{url}: its index has {num_bytes:,} bytes, more than the cache may hold (set data.source.cache_gb above "
            f"{num_bytes / 1e9:.3g})"
        )
    free_bytes = shutil.disk_usage(folder).free
    if num_bytes > free_bytes:
        raise DataError(
            f"data.source.cache: {printable(folder)}: has {free_bytes:,} bytes free, and the index of {url} has "
            f"{num_bytes:,} (name another folder)"
        )
