"""Shards of a pack behind a URL: read from the cache, or by range until they are cached or if they do not fit."""

import contextlib
import os
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from paceline.data.lease import FileLock
from paceline.data.pack.shards import LocalShards, ShardFile
from paceline.data.remote.address import RemoteUrl
from paceline.data.remote.cache import ShardCache
from paceline.data.remote.fetching import PIECE_BYTES, Fetcher, FetchOutcome
from paceline.data.remote.keeper import ShardPrefetcher
from paceline.data.remote.patience import RetryPolicy
from paceline.data.remote.transport import Transport


@dataclass(frozen=True, eq=False)
class _ProcessState:
    """Threads, locks and connections of one process, none of which survives a fork."""

    fetcher: Fetcher
    prefetcher: ShardPrefetcher
    lock: FileLock
    pid: int

    def close(self) -> None:
        """Release all without waiting for downloads; no-op in a forked child."""
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


# Reading a sample by range also requests its shard, so that training starts immediately. The caller verifies samples
# that are read by range; a cached shard is verified when it is fetched.
@dataclass(frozen=True, eq=False)
class RemoteShards:
    """Shards `files` at `addresses`, cached in `cache` under `digest`; `connect` creates the transport of a process.

    Threads can share it; a forked process creates its own connections, and unpickling opens new ones.
    """

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
        object.__setattr__(self, "_keep", _ShardFetcher(self.addresses, self.files, self.cache, folder))

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
        """Return a shard's file as mapped memory, or None if it is not cached yet; then request it."""
        if self._is_cached(shard):
            return self._local.memory(shard)
        self._get_process_state().prefetcher.request(shard)
        return None

    def array(self, shard: int, offset: int, length: int) -> NDArray[np.uint8]:
        """Return bytes of a shard as writable uint8 [length], after waiting for its download; mapped if cached."""
        state = self._get_process_state()
        if self._is_cached(shard) or self._fetch_shard(state.fetcher, shard, wait=True) == "kept":
            return self._local.array(shard, offset, length)
        pixels = np.empty(length, dtype=np.uint8)
        for start in range(0, length, PIECE_BYTES):
            stop = min(start + PIECE_BYTES, length)
            pixels[start:stop] = np.frombuffer(self.read(shard, offset + start, stop - start), dtype=np.uint8)
        return pixels

    def wait(self) -> None:
        """Wait until every requested shard is cached or has failed."""
        self._get_process_state().prefetcher.wait()

    def prefetch(self, shards: Iterable[int]) -> None:
        """Request `shards` in this order without waiting. Raise `DataError` for one that was damaged before."""
        for shard in shards:
            if not self._is_cached(shard):
                self._get_process_state().prefetcher.request(shard)

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
            keeper = ShardPrefetcher(partial(self._fetch_shard, fetcher, wait=False))
            made = _ProcessState(fetcher, keeper, self.cache.acquire(self.digest), os.getpid())
            process = self._processes.setdefault(os.getpid(), made)
            if process is made:
                weakref.finalize(self, made.close)
            else:  # another thread was first
                made.close()
        return process
