"""Open a pack behind a URL: read its header, and fetch its index into the cache."""

import contextlib
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from paceline.core.dataset import Datasets
from paceline.core.errors import DataError
from paceline.core.urls import HOW_TO_PASS_CREDENTIALS, find_secret, public_url
from paceline.data.lease import acquire_file_lock
from paceline.data.pack.format import ALIGNMENT, INDEX_NAME, FileRole, IndexLayout, IndexSizes, PackHeader
from paceline.data.pack.index import open_index
from paceline.data.pack.reader import build_pack_datasets
from paceline.data.pack.shards import HEADER_BYTES
from paceline.data.remote.address import HTTP_SCHEMES, RemoteUrl
from paceline.data.remote.cache import ShardCache
from paceline.data.remote.fetching import Fetcher, has_valid_index
from paceline.data.remote.filesystem import FsspecTransport
from paceline.data.remote.http import HttpTransport
from paceline.data.remote.patience import RetryPolicy
from paceline.data.remote.shards import RemoteShards
from paceline.data.remote.transport import Transport
from paceline.data.sources.places import printable

# Index of about a million samples.
_SMALL_INDEX_BYTES: Final = 64 << 20


def is_remote(root: str) -> bool:
    """Return whether a pack's root is a URL."""
    return "://" in root


def open_remote(root: str, cache: Path, cache_bytes: int, retry: RetryPolicy | None = None) -> Datasets:
    """Open the splits of the pack behind the URL `root`, a file that ends with `.pack` or a folder of shards.

    The index, and as many shards as fit into `cache_bytes`, are kept below the folder `cache`. Raise `DataError` naming
    the URL if it is not a pack, contains a password or a query, or cannot be read.
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
            path = shard_cache.top / digest / INDEX_NAME
            _fetch_index(Fetcher(transport, retry), address, header, path, cache_bytes)
            index = open_index(path, address.display_url)
            is_whole = header.role is FileRole.WHOLE
            addresses = tuple(address if is_whole else address.sibling(file.name) for file in index.files)
            return build_pack_datasets(
                index, RemoteShards(addresses, index.files, shard_cache, digest, connect, retry).acquire_lock()
            )


def _fetch_index(fetcher: Fetcher, address: RemoteUrl, header: PackHeader, index: Path, cache_bytes: int) -> None:
    partial = index.with_suffix(".part")
    try:
        while not index.exists():
            lock = acquire_file_lock(partial, is_exclusive=True, should_wait=True)
            assert lock is not None, "take() waits"
            with contextlib.closing(lock):
                if index.exists():
                    lock.remove()
                    break
                _check_index_size(fetcher, address, header, index.parent, cache_bytes)
                os.ftruncate(lock.descriptor, 0)
                spans = [(0, HEADER_BYTES), (header.index_offset, header.num_bytes)]
                fetcher.fetch_ranges(address, lock.descriptor, spans, header.num_bytes)
                if not has_valid_index(lock.descriptor, header):
                    raise DataError(f"{address.display_url}: its index is damaged (upload it again, or pack it again)")
                os.fsync(lock.descriptor)
                partial.rename(index)
    except OSError as error:
        raise DataError(f"data.source.cache: {printable(index)}: {error.strerror} (name another folder)") from error


def _check_index_size(fetcher: Fetcher, address: RemoteUrl, header: PackHeader, folder: Path, cache_bytes: int) -> None:
    """Raise `DataError` if the index is too large for the cache or the disk, or its size does not match its samples."""
    url, num_bytes = address.display_url, header.index_bytes
    first = header.index_offset
    if num_bytes < ALIGNMENT:
        raise DataError(f"{url}: its index is damaged (upload it again, or pack it again)")
    # The first bytes of the index determine its size.
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
    status = os.statvfs(folder)
    free_bytes = status.f_bavail * status.f_frsize
    if num_bytes > free_bytes:
        raise DataError(
            f"data.source.cache: {printable(folder)}: has {free_bytes:,} bytes free, and the index of {url} has "
            f"{num_bytes:,} (name another folder)"
        )
