"""The shards of a pack behind a URL: kept whole on disk as far as they fit, read sample by sample until then and else.

The first sample of a shard is read by its range, so that training starts at once, and the shard is fetched meanwhile.
Bytes that come by ranges are proved by whoever reads the sample, a kept shard by its checksum when it is fetched.
"""

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

from paceline.data.lease import Lease
from paceline.data.pack.shards import LocalShards, ShardFile
from paceline.data.remote.address import Address
from paceline.data.remote.cache import Cache
from paceline.data.remote.fetching import PIECE_BYTES, Fetcher, Outcome
from paceline.data.remote.keeper import Keeper
from paceline.data.remote.patience import Patience
from paceline.data.remote.transport import Transport


@dataclass(frozen=True, eq=False)
class _Process:
    """What a process has of its own: threads, locks and connections, none of which survives a fork."""

    fetcher: Fetcher
    keeper: Keeper
    lease: Lease
    pid: int

    def close(self) -> None:
        """Give all of it back, without waiting for what is under way. In a forked process, leave it to the parent."""
        if self.pid != os.getpid():
            return
        self.fetcher.stops.set()
        self.keeper.end()
        self.fetcher.transport.close()
        self.lease.close()


@dataclass(frozen=True, eq=False)
class _Keep:
    """Has shards kept. It does not know who reads them, so that threads that use it keep no reader from going."""

    addresses: tuple[Address, ...]
    files: tuple[ShardFile, ...]
    cache: Cache
    folder: Path

    def __call__(self, fetcher: Fetcher, shard: int, *, wait: bool) -> Outcome:
        file = self.files[shard]
        return fetcher.keep(self.addresses[shard], file, self.folder / file.name, self.cache, wait=wait)


@dataclass(frozen=True, eq=False)
class RemoteShards:
    """Shards `files` at `addresses`, kept in `cache` under `digest`; `connect` makes the transport of a process.

    Threads may share it; a forked process goes on with connections of its own, and a pickled one opens anew.
    """

    addresses: tuple[Address, ...]
    files: tuple[ShardFile, ...]
    cache: Cache
    digest: str
    connect: Callable[[], Transport]
    patience: Patience
    _kept: set[int] = field(default_factory=set, init=False, repr=False)
    _processes: dict[int, _Process] = field(default_factory=dict, init=False, repr=False)
    _local: LocalShards = field(init=False, repr=False)
    _keep: _Keep = field(init=False, repr=False)

    def __post_init__(self) -> None:
        folder = self.cache.shards_of(self.digest)
        object.__setattr__(self, "_local", LocalShards(folder, self.files))
        object.__setattr__(self, "_keep", _Keep(self.addresses, self.files, self.cache, folder))

    def __len__(self) -> int:
        return len(self.files)

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteShards, (self.addresses, self.files, self.cache, self.digest, self.connect, self.patience)

    def held(self) -> Self:
        """Return it, with the lock taken under which nothing that is kept of it is removed."""
        self._here()
        return self

    def read(self, shard: int, offset: int, length: int) -> bytes:
        """Return `length` bytes of a shard. Raise `DataError` naming its URL where they cannot be had."""
        if self._is_kept(shard):
            return self._local.read(shard, offset, length)
        here = self._here()
        here.keeper.want(shard)
        file = self.files[shard]
        return here.fetcher.read(self.addresses[shard], offset, offset + length, file.num_bytes)

    def memory(self, shard: int) -> memoryview | None:
        """Return all of a shard's file, mapped; None where it is not here, and is fetched if it fits."""
        if self._is_kept(shard):
            return self._local.memory(shard)
        self._here().keeper.want(shard)
        return None

    def array(self, shard: int, offset: int, length: int) -> NDArray[np.uint8]:
        """Return bytes of a shard as uint8 [length] that may be written to: mapped, or read where it does not fit.

        Waits until they are here.
        """
        here = self._here()
        if self._is_kept(shard) or self._keep(here.fetcher, shard, wait=True) == "kept":
            return self._local.array(shard, offset, length)
        pixels = np.empty(length, dtype=np.uint8)
        for start in range(0, length, PIECE_BYTES):
            stop = min(start + PIECE_BYTES, length)
            pixels[start:stop] = np.frombuffer(self.read(shard, offset + start, stop - start), dtype=np.uint8)
        return pixels

    def settle(self) -> None:
        """Wait until every shard that was wanted is here, or cannot be."""
        self._here().keeper.settle()

    def prefetch(self, shards: Iterable[int]) -> None:
        """Have `shards` fetched, as far as they fit, in this order and several at once, and do not wait for it.

        Raise `DataError` for one that was found damaged.
        """
        for shard in shards:
            if not self._is_kept(shard):
                self._here().keeper.want(shard)

    def close(self) -> None:
        """End what is under way, and give back connections, descriptors, maps and the lock on what is kept."""
        process = self._processes.pop(os.getpid(), None)
        if process is not None:
            process.close()
        self._local.close()

    def _is_kept(self, shard: int) -> bool:
        if shard in self._kept:
            return True
        path = self._local.folder / self.files[shard].name
        if not path.exists():
            return False
        self._here()  # which holds the lock that it may not be removed under
        with contextlib.suppress(OSError):
            os.utime(path)  # opened last, given up last
        self._kept.add(shard)
        return True

    def _here(self) -> _Process:
        """Return what is this process's own; the parent's, which a forked one finds too, is left alone."""
        process = self._processes.get(os.getpid())
        if process is None:
            fetcher = Fetcher(self.connect(), self.patience)
            keeper = Keeper(partial(self._keep, fetcher, wait=False))
            made = _Process(fetcher, keeper, self.cache.use(self.digest), os.getpid())
            process = self._processes.setdefault(os.getpid(), made)
            if process is made:
                weakref.finalize(self, made.close)
            else:  # another thread was first
                made.close()
        return process
