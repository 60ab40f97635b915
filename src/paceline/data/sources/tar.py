"""List the files in a tar by its headers, without unpacking it.

Formats are POSIX ustar and pax, GNU and old tars:
https://pubs.opengroup.org/onlinepubs/9799919799/utilities/pax.html and
https://www.gnu.org/software/tar/manual/html_node/Standard.html
"""

# Not `tarfile`: it is several times slower, takes a damaged header for the end of the tar and ignores
# damaged extended headers, so that samples would be missing or wrong, and reads extended headers of any size.
import os
import zlib
from collections.abc import Iterator
from typing import NamedTuple

from paceline.core.errors import DataError
from paceline.data.files import OpenFile, printable

BLOCK_BYTES = 512
_ZERO_BLOCK = bytes(BLOCK_BYTES)
_READ_AHEAD_BYTES = 4096  # one read covers a header, a label and the next header
_MAX_NAME_BYTES = 2**16
_MAX_EXTENSION_BYTES = 2**20
_EXTENSION_KINDS = b"xgLK"  # pax, pax for all files, GNU's long name, GNU's long link name
_REGULAR_KINDS = b"0\0" + b"7"
_KINDS_WITHOUT_CONTENT = b"123456"  # links, devices, folders, pipes
_COMPRESSION_MAGIC = {b"\x1f\x8b": "gzip", b"BZ": "bzip2", b"\xfd7": "xz", b"\x28\xb5": "zstd"}


class TarMember(NamedTuple):
    """A regular file in a tar; its content is `length` bytes from byte `start` of the tar on."""

    name: bytes
    start: int
    length: int


class _TarHeader(NamedTuple):
    name: bytes
    length: int
    kind: bytes


class TarReader:
    """Read a tar through a window of 4 KiB."""

    def __init__(self, path: str) -> None:
        self._path = path
        try:
            self._file = OpenFile(path)
        except OSError as error:
            raise DataError(f"{printable(path)}: cannot be read: {error.strerror}; correct the path") from error
        self.num_bytes = self._file.num_bytes
        self._window = b""
        self._window_start = 0

    def build_error(self, reason: str, fix: str = "copy it again, or make it again") -> DataError:
        """Build an error that names this tar."""
        return DataError(f"{printable(self._path)}: {reason}; {fix}")

    def read(self, start: int, length: int) -> bytes:
        """Return bytes of the tar. Raise `DataError` if they cannot be read."""
        at = start - self._window_start
        if not 0 <= at <= len(self._window) - length:
            try:
                self._window = os.pread(self._file.descriptor, max(length, _READ_AHEAD_BYTES), start)
            except OSError as error:
                raise self.build_error(f"cannot be read at byte {start:,}: {error.strerror}") from error
            self._window_start, at = start, 0
        content = self._window[at : at + length]
        if len(content) < length:
            raise self.build_error(f"is truncated: ends after {self.num_bytes:,} bytes without an end marker")
        return content

    def members(self) -> Iterator[TarMember]:
        """Yield the regular files in order. Raise `DataError` unless this is a complete tar with its end marker."""
        offset: int | None = 0
        while offset is not None:
            header, start = self._read_next_header(offset)
            if header is None:
                return
            if header.kind in _REGULAR_KINDS and not header.name.endswith(b"/"):
                yield TarMember(header.name, start, header.length)
            offset = start + (0 if header.kind in _KINDS_WITHOUT_CONTENT else _round_to_blocks(header.length))

    def _read_next_header(self, offset: int) -> tuple[_TarHeader | None, int]:
        """Return (next file header with extension headers applied, or None at the end; offset of its content)."""
        name = length = None
        while (block := self.read(offset, BLOCK_BYTES)) != _ZERO_BLOCK:
            header, offset = self._parse_header(block, offset), offset + BLOCK_BYTES
            if header.kind not in _EXTENSION_KINDS:
                whole = _TarHeader(
                    header.name if name is None else name, header.length if length is None else length, header.kind
                )
                if whole.length > self.num_bytes - offset and whole.kind not in _KINDS_WITHOUT_CONTENT:
                    raise self.build_error(
                        f"is truncated in {format_member_name(whole.name)}, which has {whole.length:,} bytes"
                    )
                return whole, offset
            if header.length > _MAX_EXTENSION_BYTES:
                raise self.build_error(f"is damaged: has a name or comment of {header.length:,} bytes")
            content = self.read(offset, header.length)
            match header.kind:
                case b"L":
                    name = content.partition(b"\0")[0]
                case b"x":
                    fields = self._parse_pax_records(content, offset)
                    name = fields.get(b"path", name)
                    length = self._parse_pax_size(fields[b"size"], offset) if b"size" in fields else length
            offset += _round_to_blocks(header.length)
        return None, offset

    def _parse_header(self, block: bytes, at: int) -> _TarHeader:
        field = block[148:156]  # the checksum is the sum of all bytes with this field as spaces
        checksum = _parse_number(field)
        # The lower half of an Adler-32 is 1 + the sum of all bytes, modulo 65521 (RFC 1950): 20 times faster than sum.
        if checksum is None or zlib.adler32(block) & 0xFFFF != (1 + checksum - 8 * 32 + sum(field)) % 65521:
            raise self._build_header_error(block, at)
        length = _parse_number(block[124:136])
        if length is None or block[156:157] == b"S":
            raise self.build_error(f"has a sparse or endless file at byte {at:,}, which is not supported")
        name = block[:100].partition(b"\0")[0]
        if block[345] and block[257:263] == b"ustar\0":
            name = block[345:500].partition(b"\0")[0] + b"/" + name
        return _TarHeader(name, length, block[156:157])

    def _build_header_error(self, block: bytes, at: int) -> DataError:
        compression = "" if at else _COMPRESSION_MAGIC.get(block[:2], "")
        if compression:
            fix = "unpack it to a .tar (the images in it are compressed already)"
            return self.build_error(f"is compressed ({compression}), which prevents random access to samples", fix)
        return self.build_error(f"is damaged: has no header at byte {at:,}" if at else "is not a tar")

    def _parse_pax_records(self, content: bytes, at: int) -> dict[bytes, bytes]:
        fields = {}
        start = 0  # records are lines `LENGTH KEY=VALUE`, where LENGTH includes itself
        while start < len(content):  # by index: slicing off each record would take quadratic time
            digits, _, _ = content[start : start + 20].partition(b" ")
            stop = start + (int(digits) if digits.isdigit() else 0)
            key, is_record, value = content[start + len(digits) + 1 : max(start, stop - 1)].partition(b"=")
            if not (is_record and content[stop - 1 : stop] == b"\n"):
                raise self.build_error(f"is damaged: has no extended header at byte {at:,}")
            fields[key] = value
            start = stop
        if any(key.startswith(b"GNU.sparse.") for key in fields):
            raise self.build_error(f"has a sparse or endless file at byte {at:,}, which is not supported")
        return fields

    def _parse_pax_size(self, text: bytes, at: int) -> int:
        if not (text.isdigit() and len(text) < 20):
            raise self.build_error(f"is damaged: has no extended header at byte {at:,}")
        return int(text)


def _round_to_blocks(length: int) -> int:
    return -(-length // BLOCK_BYTES) * BLOCK_BYTES


def _parse_number(field: bytes) -> int | None:
    # Octal digits, or GNU's binary numbers after the byte 128; None if it is neither.
    if field[0] == 0x80:
        return int.from_bytes(field[1:])
    digits = field.strip(b" \0")
    try:
        return int(digits, 8) if digits.isdigit() else None
    except ValueError:  # an 8 or a 9
        return None


def format_member_name(name: bytes) -> str:
    """Return a member's name for messages."""
    return printable(os.fsdecode(name))[:200]
