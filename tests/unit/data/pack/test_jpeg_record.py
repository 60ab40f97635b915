"""Records are parsed and restored to JPEG files."""

import io
import struct

import numpy as np
import pytest
from PIL import Image

from paceline.data.decode import decode
from paceline.data.pack.jpeg_record import JpegRecord, restore_jpeg


def pixels(file, channels=3):
    return np.asarray(decode(file, channels=channels, name="x"))


CASES = {
    "colour": {}, "grey": {"mode": "L"}, "4:4:4": {"subsampling": 0}, "4:2:2": {"subsampling": 1}, "one block": {
        "width": 8, "height": 8}, "one pixel": {"width": 1, "height": 1}, "odd": {"width": 17, "height": 33},
    "low quality": {"quality": 3}, "best quality": {"quality": 100}, "own tables": {"optimize": True},
}  # fmt: skip


@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
def test_a_restored_file_has_the_pixels_of_the_file_that_was_indexed(make_photo, make_record, options):
    file = make_photo(1, **options)
    again = restore_jpeg(make_record(file))
    np.testing.assert_array_equal(pixels(again), pixels(file))
    np.testing.assert_array_equal(pixels(again, 1), pixels(file, 1))


def test_a_restored_file_has_the_same_scan(make_photo, make_record):
    file = make_photo(2, 200, 100, quality=95)
    scan = file[file.index(b"\xff\xda") :]
    assert b"\xff\0" in scan, "nothing is stuffed"
    assert restore_jpeg(make_record(file)).endswith(scan[scan.index(b"\x3f\0") :])


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_kept(make_photo, make_record, orientation):
    record = bytearray(make_record(make_photo(3, 40, 30)))
    record[9] = orientation
    exif = Image.Exif()
    exif[0x0112] = orientation
    found = pixels(restore_jpeg(bytes(record)))
    np.testing.assert_array_equal(found, pixels(make_photo(3, 40, 30, exif=exif)))
    assert JpegRecord.from_bytes(bytes(record)).size == found.shape[:2]


def test_tables_of_16_bits_are_written_as_such(make_photo, make_record):
    record = bytearray(make_record(make_photo(4, mode="L")))
    struct.pack_into("<H", record, 32 + 2 * 63, 300)
    file = Image.open(io.BytesIO(restore_jpeg(bytes(record))))
    assert file.quantization[0][63] == 300
    file.load()


WRONG = {
    "another magic": (0, b"PJ2\0"), "no width": (4, b"\0\0"), "no height": (6, b"\0\0"), "two components": (8, b"\2"),
    "orientation 0": (9, b"\0"), "orientation 9": (9, b"\x09"), "every 0": (10, b"\0"),
    "a byte that is zero": (11, b"1"),
    "a factor of 3": (12, b"\x31"), "a table 2": (15, b"\x20"), "no tables": (18, b"\0"), "five tables": (18, b"\x1f"),
    "more points": (20, b"\xff\xff\xff\xff"), "more bits": (24, b"\xff\xff\xff\xff"), "more codes": (28, b"\xff" * 4),
    "huge": (4, b"\xff\xff\xff\xff"), "counts that do not add up": (32 + 3 * 128, b"\xff"),
}  # fmt: skip


@pytest.mark.parametrize(("offset", "value"), WRONG.values(), ids=WRONG.keys())
def test_an_inconsistent_record_is_refused(make_photo, make_record, offset, value):
    record = bytearray(make_record(make_photo(5)))
    restore_jpeg(bytes(record))
    record[offset : offset + len(value)] = value
    with pytest.raises(ValueError, match=r"damaged|not a record|pixels|factors|Huffman"):
        restore_jpeg(bytes(record))


def test_a_record_truncated_anywhere_is_refused(make_photo, make_record):
    record = make_record(make_photo(6, 8, 8))
    for length in range(len(record)):
        with pytest.raises(ValueError, match=r"not a record|Huffman"):
            restore_jpeg(record[:length])
