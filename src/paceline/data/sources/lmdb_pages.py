"""Find values in an LMDB file without the LMDB library, which would crash where the file cannot be read."""

# The library maps the file: a disk error, or a file that is cut while it is read, ends the process by SIGBUS (mmap(2))
# without a message. Labels are always read in the rank, samples too without worker processes. The library also crashes
# on some damaged files, unless `lmdb.verify` walks all pages at every opening. Here every offset is checked against the
# page or file, and the search depth is bounded, so that any file gives values or a `LmdbFormatError`. LMDB has no
# checksums; the caller checks the values.
#
# Reads LMDB 0.9 files of 64-bit little-endian machines (data version 1) with one main database without options. Layout:
# `struct MDB_page`, `MDB_meta`, `MDB_db` and `MDB_node` in
# https://github.com/LMDB/lmdb/blob/LMDB_0.9.31/libraries/liblmdb/mdb.c

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from paceline.data.files import OpenFile, RandomAccessFiles

_PAGE_HEADER = struct.Struct("<QHHHH")  # page number, (unused), flags, end of the node pointers, start of the nodes
_META_STRUCT = struct.Struct("<II16xI44x4xHH24xQQQQ")  # after the page header; only the fields that are used
_NODE_HEADER = struct.Struct("<HHHH")
_PAGE_NUMBER = struct.Struct("<Q")
_IS_BRANCH, _IS_LEAF, _IS_META = 1, 2, 8
_IS_OVERFLOW = 1  # a node whose value is on pages of its own
_MAGIC, _LMDB_DATA_VERSION = 0xBEEFC0DE, 1
_VALID_PAGE_BYTES = tuple(2**power for power in range(9, 17))
_MAX_DEPTH = 32
_CACHE_BYTES = 4 * 2**20


class LmdbFormatError(ValueError):
    """Why a file is not a complete LMDB, as the rest of a sentence that begins with the file's name."""


@dataclass(frozen=True)
class MetaPage:
    """Fields of a meta page, of the file and of the main database."""

    page_bytes: int
    flags: int
    depth: int
    num_entries: int
    root: int
    last_page: int
    transaction: int


class PageReader:
    """Read the pages of the tree in the file at `path`."""

    def __init__(self, path: Path) -> None:
        try:
            size = OpenFile(str(path)).num_bytes
            self.files = RandomAccessFiles((str(path),), (size,))
            self.meta = self._newest_meta(size)
        except OSError as error:
            raise LmdbFormatError(f"cannot be read: {error.strerror}") from error

    def read(self, number: int) -> "TreePage":
        """Return page `number` of the tree. Raise `LmdbFormatError` if it is not valid."""
        size = self.meta.page_bytes
        if not 2 <= number <= self.meta.last_page:
            raise LmdbFormatError(f"refers to page {number} of {self.meta.last_page + 1}")
        try:
            content = self.files.read(0, number * size, size)
        except OSError as error:
            raise LmdbFormatError(f"page {number} cannot be read: {error.strerror}") from error
        stored_number, _, flags, lower, upper = _PAGE_HEADER.unpack_from(content)
        is_valid = stored_number == number and flags in (_IS_BRANCH, _IS_LEAF) and not lower % 2
        if not is_valid or not _PAGE_HEADER.size < lower <= upper <= size:
            raise LmdbFormatError(f"page {number} is not a page of the tree")
        pointers = struct.unpack_from(f"<{(lower - _PAGE_HEADER.size) // 2}H", content, _PAGE_HEADER.size)
        return TreePage(content, number, flags == _IS_LEAF, pointers)

    def _newest_meta(self, size: int) -> MetaPage:
        # LMDB writes its two meta pages in turn, so that the older one stays valid if a write is interrupted.
        first = self._read_meta(0, 0, size)
        metas = (first, self._read_meta(1, first.page_bytes, size))
        newest = max(metas, key=lambda meta: meta.transaction)
        expected_size = (newest.last_page + 1) * newest.page_bytes
        if metas[1].page_bytes != first.page_bytes or newest.flags or newest.depth > _MAX_DEPTH:
            raise LmdbFormatError("its meta pages are not those of a single LMDB database")
        if expected_size > size:
            raise LmdbFormatError(f"is truncated: has {size:,} of {expected_size:,} bytes")
        return newest

    def _read_meta(self, number: int, start: int, size: int) -> MetaPage:
        length = _PAGE_HEADER.size + _META_STRUCT.size
        if start + length > size:
            raise LmdbFormatError(f"is truncated: its {size:,} bytes hold no meta pages")
        content = self.files.read(0, start, length)
        stored_number, _, page_flags, _, _ = _PAGE_HEADER.unpack_from(content)
        magic, version, *fields = _META_STRUCT.unpack_from(content, _PAGE_HEADER.size)
        if magic != _MAGIC or page_flags != _IS_META or stored_number != number:
            raise LmdbFormatError("is not an LMDB of a 64-bit little-endian machine")
        if version != _LMDB_DATA_VERSION:
            raise LmdbFormatError(f"is of version {version} of LMDB's format, and {_LMDB_DATA_VERSION} can be read")
        meta = MetaPage(*fields)
        if meta.page_bytes not in _VALID_PAGE_BYTES:
            raise LmdbFormatError(f"has pages of {meta.page_bytes:,} bytes")
        return meta


@dataclass(frozen=True)
class TreePage:
    """A page of the tree; `pointers` are the offsets of its nodes."""

    content: bytes
    number: int
    is_leaf: bool
    pointers: tuple[int, ...]

    def get_key(self, index: int) -> bytes:
        """Return the key of node `index`, b"" or a truncated key if the node leaves the page."""
        start = self.pointers[index]
        if start > len(self.content) - _NODE_HEADER.size:
            return b""
        (length,) = struct.unpack_from("<H", self.content, start + 6)
        return self.content[start + _NODE_HEADER.size : start + _NODE_HEADER.size + length]

    def get_node(self, index: int) -> tuple[int, int, int, int] | None:
        """Return (low, middle, high 16 bits of a number; offset of the value), or None if the node leaves the page."""
        start = self.pointers[index]
        if start > len(self.content) - _NODE_HEADER.size:
            return None
        low, middle, high, key_bytes = _NODE_HEADER.unpack_from(self.content, start)
        return low, middle, high, start + _NODE_HEADER.size + key_bytes


class LmdbReader:
    """Look up values of an LMDB by key, in any thread or forked process; cheap to pickle."""

    def __init__(self, path: Path) -> None:
        self._pages = PageReader(path)
        self._read_page = _cache_pages(self._pages)

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return self._pages.files.sizes[0]

    @property
    def num_entries(self) -> int:
        """Number of entries according to the file, unchecked."""
        return self._pages.meta.num_entries

    def read(self, start: int, length: int) -> bytes:
        """Return bytes at a position from `locate`. Raise `LmdbFormatError` if they cannot be read."""
        try:
            return self._pages.files.read(0, start, length)
        except OSError as error:
            raise LmdbFormatError(f"cannot be read: {error.strerror}") from error

    def locate(self, key: bytes) -> tuple[int, int]:
        """Return (offset in the file, length) of the value of `key`. Raise `LmdbFormatError` if it is missing."""
        meta = self._pages.meta
        number = meta.root
        for level in range(meta.depth):
            page = self._read_page(number)
            if page.is_leaf != (level == meta.depth - 1):
                raise LmdbFormatError(f"page {number} is on a wrong level of the tree")
            if page.is_leaf:
                return self._find_value(page, key)
            number = self._find_child(page, key)
        raise LmdbFormatError("holds nothing")

    def _find_child(self, page: TreePage, key: bytes) -> int:
        # The first node of a branch has no key: it leads to everything before the second.
        index = bisect_right(range(1, len(page.pointers)), key, key=page.get_key)
        node = page.get_node(index)
        if node is None:
            raise LmdbFormatError(f"page {page.number} has nodes outside it")
        low, middle, high, _ = node
        return low | middle << 16 | high << 32

    def _find_value(self, page: TreePage, key: bytes) -> tuple[int, int]:
        index = bisect_left(range(len(page.pointers)), key, key=page.get_key)
        node = page.get_node(index) if index < len(page.pointers) and page.get_key(index) == key else None
        if node is None:
            raise LmdbFormatError(f"has no {key.decode()}")
        low, middle, flags, start = node
        length, size = low | middle << 16, self._pages.meta.page_bytes
        first_byte, end = page.number * size + start, (page.number + 1) * size
        if flags == _IS_OVERFLOW and start + _PAGE_NUMBER.size <= size:
            (first,) = _PAGE_NUMBER.unpack_from(page.content, start)
            first_byte, end = first * size + _PAGE_HEADER.size, (self._pages.meta.last_page + 1) * size
        elif flags:
            raise LmdbFormatError(f"{key.decode()} is stored in a way that is not known")
        if first_byte + length > end:
            raise LmdbFormatError(f"{key.decode()} does not lie within the file")
        return first_byte, length

    def __getstate__(self) -> PageReader:
        return self._pages

    def __setstate__(self, pages: PageReader) -> None:
        self._pages = pages
        self._read_page = _cache_pages(pages)


def _cache_pages(pages: PageReader) -> Callable[[int], TreePage]:
    # The upper pages are needed for every lookup.
    return lru_cache(_CACHE_BYTES // pages.meta.page_bytes)(pages.read)
