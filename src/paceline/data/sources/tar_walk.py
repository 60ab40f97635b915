"""List the files in a tar without unpacking it: from header to header, over what lies between.

Reads POSIX ustar, GNU and old tars with their long names, as GNU tar, Python and WebDataset write them:
https://pubs.opengroup.org/onlinepubs/9799919799/utilities/pax.html and
https://www.gnu.org/software/tar/manual/html_node/Standard.html. Names are names only: nothing is made under them, no
link is followed. A tar that is cut short or damaged is refused, also where it ends after a whole file: its end must be
marked, as every writer of tars does.
"""

import os
import zlib
from collections.abc import Iterator
from typing import NamedTuple

from paceline.core.errors import DataError
from paceline.data.sources.open_files import OpenFile
from paceline.data.sources.places import printable

BLOCK_BYTES = 512
_EMPTY = bytes(BLOCK_BYTES)
_AHEAD_BYTES = 4096  # a header, a label, and the header of the image that follows come in one piece
_MAX_NAME_BYTES = 2**16
_MAX_EXTENSION_BYTES = 2**20
_EXTENSIONS = b"xgLK"
_REGULAR = b"0\0" + b"7"
_WITHOUT_CONTENT = b"123456"  # links, devices, folders, pipes
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZ": "bzip2", b"\xfd7": "xz", b"\x28\xb5": "zstd"}


class Member(NamedTuple):
    """A regular file in a tar: its name, and where its bytes are."""

    name: bytes
    start: int
    length: int


class _Header(NamedTuple):
    name: bytes
    length: int
    kind: bytes


class Tar:
    """A tar, read through a window: most of what is wanted lies close to a header."""

    def __init__(self, path: str) -> None:
        self._path = path
        try:
            self._file = OpenFile(path)
        except OSError as error:
            raise DataError(f"{printable(path)}: cannot be read: {error.strerror}; correct the path") from error
        self.num_bytes = self._file.num_bytes
        self._window = b""
        self._window_start = 0

    def damage(self, reason: str, fix: str = "copy it again, or make it again") -> DataError:
        """Return what to raise about the tar."""
        return DataError(f"{printable(self._path)}: {reason}; {fix}")

    def read(self, start: int, length: int) -> bytes:
        """Return bytes of the tar. Raise `DataError` where they cannot be read."""
        at = start - self._window_start
        if not 0 <= at <= len(self._window) - length:
            try:
                self._window = os.pread(self._file.number, max(length, _AHEAD_BYTES), start)
            except OSError as error:
                raise self.damage(f"cannot be read at byte {start:,}: {error.strerror}") from error
            self._window_start, at = start, 0
        found = self._window[at : at + length]
        if len(found) < length:
            raise self.damage(f"is cut short: ends after {self.num_bytes:,} bytes, without the mark of its end")
        return found

    def members(self) -> Iterator[Member]:
        """Give the regular files, in order. Raise `DataError` for what is no tar, or no whole one."""
        at: int | None = 0
        while at is not None:
            header, start = self._next(at)
            if header is None:
                return
            if header.kind in _REGULAR and not header.name.endswith(b"/"):
                yield Member(header.name, start, header.length)
            at = start + (0 if header.kind in _WITHOUT_CONTENT else _padded(header.length))

    def _next(self, at: int) -> tuple[_Header | None, int]:
        """Return the next header that stands for a file, as those before it extend it, and where its content starts."""
        name = length = None
        while (block := self.read(at, BLOCK_BYTES)) != _EMPTY:
            header, at = self._header(block, at), at + BLOCK_BYTES
            if header.kind not in _EXTENSIONS:
                whole = _Header(
                    header.name if name is None else name, header.length if length is None else length, header.kind
                )
                if whole.length > self.num_bytes - at and whole.kind not in _WITHOUT_CONTENT:
                    raise self.damage(f"is cut short in {shown(whole.name)}, which has {whole.length:,} bytes")
                return whole, at
            if header.length > _MAX_EXTENSION_BYTES:
                raise self.damage(f"is damaged: has a name or comment of {header.length:,} bytes")
            content = self.read(at, header.length)
            match header.kind:
                case b"L":
                    name = content.partition(b"\0")[0]
                case b"x":
                    fields = self._fields(content, at)
                    name = fields.get(b"path", name)
                    length = self._size(fields[b"size"], at) if b"size" in fields else length
            at += _padded(header.length)
        return None, at

    def _header(self, block: bytes, at: int) -> _Header:
        """Return what the header at byte `at` says."""
        field = block[148:156]  # counts as spaces in the sum of all bytes, which it holds
        checksum = _number(field)
        # The lower half of an Adler-32 is 1 + the sum of all bytes, modulo 65521 (RFC 1950): 20 times faster than sum.
        if checksum is None or zlib.adler32(block) & 0xFFFF != (1 + checksum - 8 * 32 + sum(field)) % 65521:
            raise self._no_header(block, at)
        length = _number(block[124:136])
        if length is None or block[156:157] == b"S":
            raise self.damage(f"has a sparse or endless file at byte {at:,}, which is not read")
        name = block[:100].partition(b"\0")[0]
        if block[345] and block[257:263] == b"ustar\0":
            name = block[345:500].partition(b"\0")[0] + b"/" + name
        return _Header(name, length, block[156:157])

    def _no_header(self, block: bytes, at: int) -> DataError:
        packed = "" if at else _COMPRESSED.get(block[:2], "")
        if packed:
            fix = "unpack it to a .tar (the images in it are compressed already)"
            return self.damage(f"is compressed ({packed}), so that samples cannot be read by place", fix)
        return self.damage(f"is damaged: has no header at byte {at:,}" if at else "is no tar")

    def _fields(self, content: bytes, at: int) -> dict[bytes, bytes]:
        """Return the records of an extended header: `LENGTH KEY=VALUE` lines, whose length counts all of the line."""
        fields = {}
        start = 0
        while start < len(content):  # from place to place: copying what is left would take the square of its length
            digits, _, _ = content[start : start + 20].partition(b" ")
            stop = start + (int(digits) if digits.isdigit() else 0)
            key, is_record, value = content[start + len(digits) + 1 : max(start, stop - 1)].partition(b"=")
            if not (is_record and content[stop - 1 : stop] == b"\n"):
                raise self.damage(f"is damaged: has no extended header at byte {at:,}")
            fields[key] = value
            start = stop
        if any(key.startswith(b"GNU.sparse.") for key in fields):
            raise self.damage(f"has a sparse or endless file at byte {at:,}, which is not read")
        return fields

    def _size(self, text: bytes, at: int) -> int:
        if not (text.isdigit() and len(text) < 20):
            raise self.damage(f"is damaged: has no extended header at byte {at:,}")
        return int(text)


def _padded(length: int) -> int:
    """Return the bytes that a file of `length` takes."""
    return -(-length // BLOCK_BYTES) * BLOCK_BYTES


def _number(field: bytes) -> int | None:
    """Return the number in a field of a header: octal digits, or, after a byte of 128, binary; None for neither."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:])
    digits = field.strip(b" \0")
    try:
        return int(digits, 8) if digits.isdigit() else None
    except ValueError:  # an 8 or a 9
        return None


def shown(name: bytes) -> str:
    """Return a name in a tar as it is printed."""
    return printable(os.fsdecode(name))[:200]
