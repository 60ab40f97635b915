"""Convert an indexed JPEG record back to a JPEG file with the same coefficients, in plain Python.

`docs/reference/indexed-jpeg.md` describes records, which the native core writes and decodes. The output follows ISO/IEC
10918-1 (JPEG), annex B, plus an EXIF segment with the orientation.
"""

import struct
from dataclasses import dataclass

import numpy as np

from paceline.data.decode import MAX_PIXELS

_MAGIC = b"PJ1\0"
_RECORD_HEADER = struct.Struct("<4sHHBBBB3s3sBBIII")
_SEEK_POINT_BYTES = 10
_TAIL_BYTES = 8
# Huffman tables in the order of the mask's bits, as class and number in a DHT segment.
_HUFFMAN_TABLES = (0x00, 0x10, 0x01, 0x11)
# Position in the block of each coefficient in file order (figure A.6 of the standard).
_ZIGZAG = np.array([
    0, 1, 8, 16, 9, 2, 3, 10, 17, 24, 32, 25, 18, 11, 4, 5,
    12, 19, 26, 33, 40, 48, 41, 34, 27, 20, 13, 6, 7, 14, 21, 28,
    35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23, 30, 37, 44, 51,
    58, 59, 52, 45, 38, 31, 39, 46, 53, 60, 61, 54, 47, 55, 62, 63,
])  # fmt: skip
_DAMAGED = "is not a record, or is damaged"


@dataclass(frozen=True)
class JpegRecord:
    """A parsed record. The entropy-coded bits are not validated."""

    width: int  # as stored, before `orientation` turns the image upright
    height: int
    orientation: int  # as in EXIF, 1 to 8
    sampling: bytes  # one byte per component: horizontal and vertical factor
    table_numbers: bytes  # one byte per component: Huffman table of the DC and of the AC coefficients
    quantization: np.ndarray  # uint16 [components, 64], not in zigzag order
    mask: int  # bit i: `huffman` contains table i of `_HUFFMAN_TABLES`
    huffman: bytes
    scan: bytes  # the entropy-coded bits, without byte stuffing

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the upright image."""
        return (self.height, self.width) if self.orientation < 5 else (self.width, self.height)

    @classmethod
    def from_bytes(cls, data: bytes) -> "JpegRecord":
        """Parse a record. Raise `ValueError` with the reason if it is invalid."""
        if len(data) < _RECORD_HEADER.size or not data.startswith(_MAGIC):
            raise ValueError(_DAMAGED)
        _, width, height, num, orientation, every, reserved, sampling, table_numbers, mask, reserved_2, *sizes = (
            _RECORD_HEADER.unpack_from(data)
        )
        num_points, scan_bytes, huffman_bytes = sizes
        is_valid = num in (1, 3) and 1 <= orientation <= 8 and width and height and every
        if not is_valid or reserved or reserved_2 or mask >> len(_HUFFMAN_TABLES):
            raise ValueError(_DAMAGED)
        if width * height > MAX_PIXELS:
            raise ValueError(f"has {width}x{height} pixels, more than {MAX_PIXELS:,}")
        _check_components(sampling, table_numbers, num, mask)
        if num_points != _count_seek_points(width, height, sampling[:num], every):
            raise ValueError(_DAMAGED)
        huffman = _RECORD_HEADER.size + num * 128
        points = -(-(huffman + huffman_bytes) // 4) * 4  # sections start at multiples of 4
        scan = -(-(points + num_points * _SEEK_POINT_BYTES) // 4) * 4
        if scan + scan_bytes + _TAIL_BYTES != len(data):
            raise ValueError(_DAMAGED)
        quantization = np.frombuffer(data, "<u2", num * 64, _RECORD_HEADER.size).reshape(num, 64)
        return cls(
            width, height, orientation, sampling[:num], table_numbers[:num], quantization, mask,
            data[huffman : huffman + huffman_bytes], data[scan : scan + scan_bytes],
        )  # fmt: skip


def restore_jpeg(data: bytes) -> bytes:
    """Return a JPEG file with the coefficients, tables and orientation of a record.

    Raise `ValueError` with the reason if the record is invalid.
    """
    record = JpegRecord.from_bytes(data)
    parts = [b"\xff\xd8", _build_exif(record.orientation)]
    distinct: list[bytes] = []
    numbers = []
    for table in record.quantization:
        values = table[_ZIGZAG].astype(">u2" if table.max() > 255 else np.uint8).tobytes()
        if values not in distinct:
            parts.append(_build_segment(0xDB, bytes([(len(values) == 128) << 4 | len(distinct)]) + values))
            distinct.append(values)
        numbers.append(distinct.index(values))
    # Baseline JPEG allows only 8-bit tables; extended sequential JPEG is otherwise the same.
    is_baseline = all(len(values) == 64 for values in distinct)
    frame = struct.pack(">BHHB", 8, record.height, record.width, len(numbers))
    rows = zip(record.sampling, numbers, strict=True)
    frame += b"".join(bytes([number + 1, *row]) for number, row in enumerate(rows))
    parts.append(_build_segment(0xC0 if is_baseline else 0xC1, frame))
    parts += [_build_segment(0xC4, bytes([code]) + table) for code, table in _split_huffman_tables(record)]
    selectors = b"".join(bytes([number + 1, table]) for number, table in enumerate(record.table_numbers))
    parts.append(_build_segment(0xDA, bytes([len(numbers)]) + selectors + b"\0\x3f\0"))
    parts += [record.scan.replace(b"\xff", b"\xff\0"), b"\xff\xd9"]
    return b"".join(parts)


def _check_components(sampling: bytes, table_numbers: bytes, num: int, mask: int) -> None:
    if any(sampling[num:]) or any(table_numbers[num:]):
        raise ValueError(_DAMAGED)
    for factors, numbers in zip(sampling[:num], table_numbers[:num], strict=True):
        if not {factors >> 4, factors & 15} <= {1, 2, 4}:
            raise ValueError("has sampling factors that no image can have")
        dc, ac = numbers >> 4, numbers & 15
        if max(dc, ac) > 1 or not mask >> 2 * dc & 1 or not mask >> 2 * ac + 1 & 1:
            raise ValueError("lacks a Huffman table")


def _count_seek_points(width: int, height: int, sampling: bytes, every: int) -> int:
    across, down = (1, 1) if len(sampling) == 1 else (max(f >> 4 for f in sampling), max(f & 15 for f in sampling))
    # An MCU of a single component is one block, whatever its sampling factors.
    mcus_x, mcus_y = -(-width // (8 * across)), -(-height // (8 * down))
    return mcus_y * -(-mcus_x // every)


def _split_huffman_tables(record: JpegRecord) -> list[tuple[int, bytes]]:
    """Return (class and number, counts and values) of each table."""
    tables = []
    start = 0
    for bit, code in enumerate(_HUFFMAN_TABLES):
        if record.mask >> bit & 1:
            num_values = sum(record.huffman[start : start + 16])
            table = record.huffman[start : start + 16 + num_values]
            if len(table) != 16 + num_values or num_values > 256:
                raise ValueError("has damaged Huffman tables")
            tables.append((code, table))
            start += len(table)
    if start != len(record.huffman):
        raise ValueError("has damaged Huffman tables")
    return tables


def _build_exif(orientation: int) -> bytes:
    if orientation == 1:
        return b""
    entry = struct.pack(">HHIHH", 0x0112, 3, 1, orientation, 0)
    return _build_segment(0xE1, b"Exif\0\0MM\0*" + struct.pack(">IH", 8, 1) + entry + bytes(4))


def _build_segment(marker: int, content: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(content) + 2) + content
