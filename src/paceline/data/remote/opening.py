"""Open a pack behind a URL: its header says which pack it is, and its index is fetched once into the cache."""

import contextlib
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from paceline.core.dataset import Datasets
from paceline.core.errors import DataError
from paceline.data.lease import take
from paceline.data.pack.format import INDEX_NAME, Header, Role
from paceline.data.pack.index import open_index
from paceline.data.pack.reader import datasets_of
from paceline.data.pack.shards import HEADER_BYTES
from paceline.data.remote.address import Address
from paceline.data.remote.cache import Cache
from paceline.data.remote.fetching import Fetcher, has_index
from paceline.data.remote.filesystem import Filesystem
from paceline.data.remote.http import Http
from paceline.data.remote.patience import Patience
from paceline.data.remote.shards import RemoteShards
from paceline.data.remote.transport import Transport
from paceline.data.sources.places import printable


def is_remote(root: str) -> bool:
    """Whether a pack's root is a URL."""
    return "://" in root


def open_remote(root: str, cache: Path, cache_bytes: int, patience: Patience | None = None) -> Datasets:
    """Return the splits of the pack behind the URL `root`, a file that ends with `.pack` or a folder of shards.

    Its index, and as many shards as fit into `cache_bytes`, are kept below the folder `cache`. A pack that has changed
    has another header, and so another folder. Raise `DataError` naming the URL where it is none or cannot be read.
    """
    address, patience = Address(root), patience or Patience()
    if not address.name.endswith(".pack"):
        address = address.below(INDEX_NAME)
    connect: Callable[[], Transport] = Http if address.parts.scheme in ("http", "https") else Filesystem
    with contextlib.closing(connect()) as transport:
        start = patience.read(transport, address, 0, HEADER_BYTES)
        header = Header.parsed(start.data, address.shown)
        if header.role is Role.SHARD:
            raise DataError(f"{address.shown}: is a shard of a pack (name the folder that it lies in)")
        digest = hashlib.sha256(start.data).hexdigest()[:16]
        kept = Cache(cache.expanduser().absolute(), cache_bytes)
        with contextlib.closing(kept.use(digest)):
            path = kept.top / digest / INDEX_NAME
            _fetch_index(Fetcher(transport, patience), address, header, path)
            index = open_index(path, address.shown)
            is_whole = header.role is Role.WHOLE
            addresses = tuple(address if is_whole else address.beside(file.name) for file in index.files)
            return datasets_of(index, RemoteShards(addresses, index.files, kept, digest, connect, patience).held())


def _fetch_index(fetcher: Fetcher, address: Address, header: Header, index: Path) -> None:
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
                os.truncate(lease.descriptor, 0)
                spans = [(0, HEADER_BYTES), (header.index_offset, header.num_bytes)]
                fetcher.fetch(address, lease.descriptor, spans, header.num_bytes)
                if not has_index(lease.descriptor, header):
                    raise DataError(f"{address.shown}: its index is damaged (upload it again, or pack it again)")
                os.fsync(lease.descriptor)
                part.rename(index)
    except OSError as error:
        raise DataError(f"data.source.cache: {printable(index)}: {error.strerror} (name another folder)") from error
