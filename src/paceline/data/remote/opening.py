"""Open a pack behind a URL: its header says which pack it is, and its index is fetched once into the cache."""

import contextlib
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from paceline.core.dataset import Datasets
from paceline.core.errors import DataError
from paceline.core.urls import LEAVE_OUT, public_url, secret_in
from paceline.data.lease import take
from paceline.data.pack.format import ALIGNMENT, INDEX_NAME, Header, Layout, Role, Sizes
from paceline.data.pack.index import open_index
from paceline.data.pack.reader import datasets_of
from paceline.data.pack.shards import HEADER_BYTES
from paceline.data.remote.address import HTTP, Address
from paceline.data.remote.cache import Cache
from paceline.data.remote.fetching import Fetcher, has_index
from paceline.data.remote.filesystem import Filesystem
from paceline.data.remote.http import Http
from paceline.data.remote.patience import Patience
from paceline.data.remote.shards import RemoteShards
from paceline.data.remote.transport import Transport
from paceline.data.sources.places import printable

_SMALL_INDEX_BYTES: Final = 64 << 20
"""That of about a million samples."""


def is_remote(root: str) -> bool:
    """Whether a pack's root is a URL."""
    return "://" in root


def open_remote(root: str, cache: Path, cache_bytes: int, patience: Patience | None = None) -> Datasets:
    """Return the splits of the pack behind the URL `root`, a file that ends with `.pack` or a folder of shards.

    Its index, and as many shards as fit into `cache_bytes`, are kept below the folder `cache`, by URL and header: a
    pack that has changed has another header, and another server may send the same one with a forged index. Raise
    `DataError` naming the URL where it is no pack, holds a password or a query, or cannot be read.
    """
    secret = secret_in(root, any_query=True)
    if secret:
        raise DataError(f"{printable(public_url(root))}: the URL holds {secret} ({LEAVE_OUT})")
    address, patience = Address(root), patience or Patience()
    if not address.name.endswith(".pack"):
        address = address.below(INDEX_NAME)
    connect: Callable[[], Transport] = Http if address.parts.scheme in HTTP else Filesystem
    with contextlib.closing(connect()) as transport:
        start = patience.read(transport, address, 0, HEADER_BYTES)
        header = Header.parsed(start.data, address.shown)
        if header.role is Role.SHARD:
            raise DataError(f"{address.shown}: is a shard of a pack (name the folder that it lies in)")
        digest = hashlib.sha256(f"{address.place}\n".encode() + start.data).hexdigest()[:16]
        kept = Cache(cache.expanduser().absolute(), cache_bytes)
        with contextlib.closing(kept.use(digest)):
            path = kept.top / digest / INDEX_NAME
            _fetch_index(Fetcher(transport, patience), address, header, path, cache_bytes)
            index = open_index(path, address.shown)
            is_whole = header.role is Role.WHOLE
            addresses = tuple(address if is_whole else address.beside(file.name) for file in index.files)
            return datasets_of(index, RemoteShards(addresses, index.files, kept, digest, connect, patience).held())


def _fetch_index(fetcher: Fetcher, address: Address, header: Header, index: Path, cache_bytes: int) -> None:
    """Have the index lie at `index`, unless it does; processes that want the same wait for one another."""
    part = index.with_suffix(".part")
    try:
        while not index.exists():
            lease = take(part, alone=True, wait=True)
            assert lease is not None, "it was waited for"
            with contextlib.closing(lease):
                if index.exists():
                    lease.remove()
                    break
                _refuse_too_large(fetcher, address, header, index.parent, cache_bytes)
                os.ftruncate(lease.descriptor, 0)
                spans = [(0, HEADER_BYTES), (header.index_offset, header.num_bytes)]
                fetcher.fetch(address, lease.descriptor, spans, header.num_bytes)
                if not has_index(lease.descriptor, header):
                    raise DataError(f"{address.shown}: its index is damaged (upload it again, or pack it again)")
                os.fsync(lease.descriptor)
                part.rename(index)
    except OSError as error:
        raise DataError(f"data.source.cache: {printable(index)}: {error.strerror} (name another folder)") from error


def _refuse_too_large(fetcher: Fetcher, address: Address, header: Header, folder: Path, cache_bytes: int) -> None:
    """Raise `DataError` for an index whose size is not that of its samples, or that does not fit into the cache.

    Its first bytes say how many samples it has, and so how long it is. A cache of any size keeps an index of up to
    `_SMALL_INDEX_BYTES`.
    """
    place, num_bytes = address.shown, header.index_bytes
    first = header.index_offset
    if num_bytes < ALIGNMENT:
        raise DataError(f"{place}: its index is damaged (upload it again, or pack it again)")
    sizes = Sizes.parsed(fetcher.read(address, first, first + ALIGNMENT, header.num_bytes))
    if Layout.of(sizes).num_bytes != num_bytes:
        samples = sum(sizes.samples)
        raise DataError(
            f"{place}: its index cannot be true: {num_bytes:,} bytes for {samples:,} samples (upload it again, or pack "
            f"it again)"
        )
    if num_bytes > max(cache_bytes, _SMALL_INDEX_BYTES):
        raise DataError(
            f"{place}: its index has {num_bytes:,} bytes, more than the cache may hold (set data.source.cache_gb above "
            f"{num_bytes / 1e9:.3g})"
        )
    status = os.statvfs(folder)
    free_bytes = status.f_bavail * status.f_frsize
    if num_bytes > free_bytes:
        raise DataError(
            f"data.source.cache: {printable(folder)}: has {free_bytes:,} bytes free, and the index of {place} has "
            f"{num_bytes:,} (name another folder)"
        )
