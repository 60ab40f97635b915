"""Find values in the file of an LMDB without LMDB: its library trusts every byte of the file it maps, this trusts none.

LMDB checks no page: a file that is cut short, or damaged, or made to do harm, ends the process that reads it (SIGBUS or
SIGSEGV) or lets it read beyond. Here every number that leads on is compared with the page or the file it leads into,
and the number of pages that a search looks at is bounded, so that any file gives values, or a `DamageError`. Whether a
value is the one that was written is for its reader to check: LMDB keeps no checksums.

Reads what LMDB 0.9 writes on 64-bit little-endian machines (its data version 1), one main database without options.
The layout of pages and nodes is that of `struct MDB_page`, `MDB_meta`, `MDB_db` and `MDB_node` in
https://github.com/LMDB/lmdb/blob/LMDB_0.9.31/libraries/liblmdb/mdb.c
"""

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from paceline.data.sources.open_files import OpenFile, OpenFiles

_HEADER = struct.Struct("<QHHHH")  # number, (unused), flags, end of the node pointers, begin of the nodes
_META = struct.Struct("<II16xI44x4xHH24xQQQQ")  # from the header on; of the two databases, what is used of them
_NODE = struct.Struct("<HHHH")
_PAGE_NUMBER = struct.Struct("<Q")
_IS_BRANCH, _IS_LEAF, _IS_META = 1, 2, 8
_IS_ELSEWHERE = 1
_MAGIC, _VERSION = 0xBEEFC0DE, 1
_PAGE_BYTES = tuple(2**power for power in range(9, 17))
_MAX_DEPTH = 32
_CACHE_BYTES = 4 * 2**20


class DamageError(ValueError):
    """Why a file is no LMDB, or no whole one: what follows its name in a message."""


@dataclass(frozen=True)
class Meta:
    """What a meta page says: of all pages, the last one, and of the main database its size and where it starts."""

    page_bytes: int
    flags: int
    depth: int
    num_entries: int
    root: int
    last_page: int
    transaction: int


class Pages:
    """Read the pages of the tree in the file at `path`, none beyond the last one."""

    def __init__(self, path: Path) -> None:
        try:
            size = OpenFile(str(path)).num_bytes
            self.files = OpenFiles((str(path),), (size,))
            self.meta = self._newest_meta(size)
        except OSError as error:
            raise DamageError(f"cannot be read: {error.strerror}") from error

    def read(self, number: int) -> "Page":
        """Return a page of the tree. Raise `DamageError` where it cannot be one."""
        size = self.meta.page_bytes
        if not 2 <= number <= self.meta.last_page:
            raise DamageError(f"leads to page {number} of {self.meta.last_page + 1}")
        try:
            content = self.files.read(0, number * size, size)
        except OSError as error:
            raise DamageError(f"page {number} cannot be read: {error.strerror}") from error
        own_number, _, flags, lower, upper = _HEADER.unpack_from(content)
        is_sane = own_number == number and flags in (_IS_BRANCH, _IS_LEAF) and not lower % 2
        if not is_sane or not _HEADER.size < lower <= upper <= size:
            raise DamageError(f"page {number} is no page of the tree")
        pointers = struct.unpack_from(f"<{(lower - _HEADER.size) // 2}H", content, _HEADER.size)
        return Page(content, number, flags == _IS_LEAF, pointers)

    def _newest_meta(self, size: int) -> Meta:
        """Return the newer of the two meta pages. Raise `DamageError` unless the whole file is there."""
        first = self._meta(0, 0, size)
        metas = (first, self._meta(1, first.page_bytes, size))
        newest = max(metas, key=lambda meta: meta.transaction)
        whole = (newest.last_page + 1) * newest.page_bytes
        if metas[1].page_bytes != first.page_bytes or newest.flags or newest.depth > _MAX_DEPTH:
            raise DamageError("its meta pages are none that LMDB writes for one database")
        if whole > size:
            raise DamageError(f"is cut short: has {size:,} of {whole:,} bytes")
        return newest

    def _meta(self, number: int, start: int, size: int) -> Meta:
        length = _HEADER.size + _META.size
        if start + length > size:
            raise DamageError(f"is cut short: its {size:,} bytes hold no meta pages")
        content = self.files.read(0, start, length)
        own_number, _, page_flags, _, _ = _HEADER.unpack_from(content)
        magic, version, *facts = _META.unpack_from(content, _HEADER.size)
        if magic != _MAGIC or page_flags != _IS_META or own_number != number:
            raise DamageError("is no LMDB of a 64-bit little-endian machine")
        if version != _VERSION:
            raise DamageError(f"is of version {version} of LMDB's format, and {_VERSION} can be read")
        meta = Meta(*facts)
        if meta.page_bytes not in _PAGE_BYTES:
            raise DamageError(f"has pages of {meta.page_bytes:,} bytes")
        return meta


@dataclass(frozen=True)
class Page:
    """A page of the tree: where each of its nodes begins."""

    content: bytes
    number: int
    is_leaf: bool
    pointers: tuple[int, ...]

    def key_of(self, index: int) -> bytes:
        """Return the key of node `index`; what does not fit the page is cut off, and so no key that is looked for."""
        start = self.pointers[index]
        if start > len(self.content) - _NODE.size:
            return b""
        (length,) = struct.unpack_from("<H", self.content, start + 6)
        return self.content[start + _NODE.size : start + _NODE.size + length]

    def node(self, index: int) -> tuple[int, int, int, int] | None:
        """Return (low, middle and high 16 bits of a number, where its data begin); None where it leaves the page."""
        start = self.pointers[index]
        if start > len(self.content) - _NODE.size:
            return None
        low, middle, high, key_bytes = _NODE.unpack_from(self.content, start)
        return low, middle, high, start + _NODE.size + key_bytes


class Tree:
    """The values of an LMDB by their keys. Cheap to send to a process, safe to use in threads and after a fork."""

    def __init__(self, path: Path) -> None:
        self._pages = Pages(path)
        self._page = _cached(self._pages)

    @property
    def num_bytes(self) -> int:
        """How long the file is."""
        return self._pages.files.sizes[0]

    @property
    def num_entries(self) -> int:
        """How many values there are said to be."""
        return self._pages.meta.num_entries

    def get(self, key: bytes) -> bytes:
        """Return the value of `key`. Raise `DamageError` where there is none."""
        start, length = self.locate(key)
        return self.read(start, length)

    def read(self, start: int, length: int) -> bytes:
        """Return bytes of a value that `locate` has found. Raise `DamageError` where they cannot be read."""
        try:
            return self._pages.files.read(0, start, length)
        except OSError as error:
            raise DamageError(f"cannot be read: {error.strerror}") from error

    def locate(self, key: bytes) -> tuple[int, int]:
        """Return (first byte in the file, length) of the value of `key`. Raise `DamageError` where there is none."""
        meta = self._pages.meta
        number = meta.root
        for level in range(meta.depth):
            page = self._page(number)
            if page.is_leaf != (level == meta.depth - 1):
                raise DamageError(f"page {number} is on a wrong level of the tree")
            if page.is_leaf:
                return self._value(page, key)
            number = self._child(page, key)
        raise DamageError("holds nothing")

    def _child(self, page: Page, key: bytes) -> int:
        # The first node of a branch has no key: it leads to everything before the second.
        index = bisect_right(range(1, len(page.pointers)), key, key=page.key_of)
        node = page.node(index)
        if node is None:
            raise DamageError(f"page {page.number} has nodes outside it")
        low, middle, high, _ = node
        return low | middle << 16 | high << 32

    def _value(self, page: Page, key: bytes) -> tuple[int, int]:
        index = bisect_left(range(len(page.pointers)), key, key=page.key_of)
        node = page.node(index) if index < len(page.pointers) and page.key_of(index) == key else None
        if node is None:
            raise DamageError(f"has no {key.decode()}")
        low, middle, flags, start = node
        length, size = low | middle << 16, self._pages.meta.page_bytes
        place, end = page.number * size + start, (page.number + 1) * size
        if flags == _IS_ELSEWHERE and start + _PAGE_NUMBER.size <= size:
            (first,) = _PAGE_NUMBER.unpack_from(page.content, start)
            place, end = first * size + _HEADER.size, (self._pages.meta.last_page + 1) * size
        elif flags:
            raise DamageError(f"{key.decode()} is stored in a way that is not known")
        if place + length > end:
            raise DamageError(f"{key.decode()} does not lie within the file")
        return place, length

    def __getstate__(self) -> Pages:
        return self._pages

    def __setstate__(self, pages: Pages) -> None:
        self._pages = pages
        self._page = _cached(pages)


def _cached(pages: Pages) -> Callable[[int], Page]:
    """Return what reads a page unless it has done so lately: the upper ones are needed for every value."""
    return lru_cache(_CACHE_BYTES // pages.meta.page_bytes)(pages.read)
