"""Every kind of image file is decoded to upright 8-bit pixels, or raises a one-line error."""

import io
import struct
import subprocess
import sys
import warnings
import zlib

import numpy as np
import pytest
from PIL import Image, ImageOps

from paceline.core.errors import DataError
from paceline.data import decode as module
from paceline.data.decode import decode, read_image_header


def encoded(image, format, **options):
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def pixels(data, channels=3):
    image = decode(data, channels=channels, name="/p/x.jpg")
    assert image.mode == {1: "L", 3: "RGB"}[channels]
    return np.asarray(image)


def error_message(data):
    with pytest.raises(DataError) as caught:
        decode(data, channels=3, name="/p/x.jpg")
    message = str(caught.value)
    assert message.startswith("/p/x.jpg: ")
    assert "\n" not in message
    assert message.endswith("; remove it or replace it")
    return message


def png_chunk(kind, content):
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png_header(width, height):
    """Return a PNG without pixels whose header claims a size."""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + png_chunk(b"IHDR", header)
        + png_chunk(b"IDAT", zlib.compress(b""))
        + png_chunk(b"IEND", b"")
    )


def exif(orientation):
    block = Image.Exif()
    block[0x0112] = orientation
    return block.tobytes()


@pytest.fixture
def color_image():
    """A smooth, asymmetric image, 24x16."""
    x, y = np.meshgrid(np.arange(24), np.arange(16))
    return Image.fromarray(np.stack([x * 10, y * 15, 255 - x * 5 - y * 5], axis=-1).astype(np.uint8))


@pytest.fixture
def gray_image(color_image):
    return color_image.convert("L")


@pytest.mark.parametrize("format", ["PNG", "BMP", "TIFF", "PPM"])
def test_a_lossless_file_gives_the_pixels_that_were_saved(format, color_image, gray_image):
    assert np.array_equal(pixels(encoded(color_image, format)), np.asarray(color_image))
    assert np.array_equal(pixels(encoded(gray_image, format), channels=1), np.asarray(gray_image))


def test_lossless_webp_gives_the_pixels_that_were_saved(color_image):
    assert np.array_equal(pixels(encoded(color_image, "WEBP", lossless=True)), np.asarray(color_image))


def test_a_jpeg_gives_what_pillow_decodes(color_image):
    data = encoded(color_image, "JPEG", quality=95)
    assert np.array_equal(pixels(data), np.asarray(Image.open(io.BytesIO(data))))


def test_colour_becomes_grey_by_luma_and_grey_becomes_colour_by_repetition(color_image, gray_image):
    assert np.array_equal(pixels(encoded(color_image, "PNG"), channels=1), np.asarray(gray_image))
    assert np.array_equal(pixels(encoded(gray_image, "PNG")), np.repeat(np.asarray(gray_image)[..., None], 3, axis=-1))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_exif_orientation_is_applied_once(format, orientation, color_image):
    options = {"JPEG": {"quality": 95}, "WEBP": {"lossless": True}}.get(format, {})
    stored = pixels(encoded(color_image, format, **options))
    turns = {3: Image.Transpose.ROTATE_180, 6: Image.Transpose.ROTATE_270, 8: Image.Transpose.ROTATE_90}
    data = encoded(color_image, format, exif=exif(orientation), **options)

    upright = pixels(data)

    if orientation in turns:
        assert np.array_equal(upright, np.asarray(Image.fromarray(stored).transpose(turns[orientation])))
    assert np.array_equal(upright, np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data)))))


@pytest.mark.parametrize("order", ["<", ">"])
def test_orientation_is_read_in_either_byte_order(order, color_image):
    mark = b"II*\0" if order == "<" else b"MM\0*"
    block = b"Exif\0\0" + mark + struct.pack(f"{order}IHHHIHHI", 8, 1, 0x0112, 3, 1, 6, 0, 0)
    assert pixels(encoded(color_image, "JPEG", exif=block)).shape == (24, 16, 3)


@pytest.mark.parametrize("orientation", [0, 9, 65535])
def test_an_invalid_orientation_is_ignored(orientation, color_image):
    assert np.array_equal(
        pixels(encoded(color_image, "JPEG", exif=exif(orientation))), pixels(encoded(color_image, "JPEG"))
    )


@pytest.mark.parametrize(
    "block",
    [
        b"Exif\0\0",
        b"Exif\0\0II*\0",
        b"Exif\0\0II*\0\xff\xff\xff\xff",
        b"Exif\0\0II*\0\x08\0\0\0\xff\xff\x12\x01",
        b"Exif\0\0nonsense",
        b"Exif\0\0II*\0" + struct.pack("<IHHHII", 8, 1, 0x011A, 5, 1, 0xFFFF),
    ],
)
def test_corrupt_exif_is_ignored(block, color_image):
    assert np.array_equal(pixels(encoded(color_image, "JPEG", exif=block)), pixels(encoded(color_image, "JPEG")))


def test_cmyk_jpeg_is_converted_to_rgb():
    ink = Image.new("CMYK", (8, 8), (0, 255, 255, 0))
    red = pixels(encoded(ink, "JPEG", quality=100))
    assert np.abs(red.astype(int) - (255, 0, 0)).max() <= 3


def test_a_palette_is_applied_and_its_transparency_dropped():
    indices = np.arange(64, dtype=np.uint8).reshape(8, 8) % 4
    palette = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (9, 8, 7)]
    image = Image.fromarray(indices)
    image.putpalette([value for color_image in palette for value in color_image])
    wanted = np.array(palette, dtype=np.uint8)[indices]
    transparencies = [{}, {"transparency": 2}, {"transparency": bytes([0, 128, 255, 3])}]
    for options in transparencies:
        assert np.array_equal(pixels(encoded(image, "PNG", **options)), wanted)
    assert pixels(encoded(image, "PNG", transparency=bytes([0, 1, 2, 3])), channels=1)[0, 0] == 76


@pytest.mark.parametrize(("mode", "channels"), [("RGBA", 3), ("LA", 1)])
def test_alpha_is_dropped_and_the_stored_colour_shows(mode, channels, color_image, gray_image):
    opaque = {"RGBA": color_image, "LA": gray_image}[mode]
    image = opaque.convert(mode)
    image.putalpha(Image.new("L", image.size, 0))
    assert np.array_equal(pixels(encoded(image, "PNG"), channels), np.asarray(opaque))


def test_a_transparent_colour_is_dropped(color_image, gray_image):
    assert np.array_equal(pixels(encoded(color_image, "PNG", transparency=(0, 0, 255))), np.asarray(color_image))
    assert np.array_equal(pixels(encoded(gray_image, "PNG", transparency=7)), pixels(encoded(gray_image, "PNG")))


@pytest.mark.parametrize("format", ["PNG", "TIFF", "PPM", "BMP"])
def test_one_bit_becomes_black_and_white(format):
    bits = np.indices((9, 11)).sum(axis=0) % 2 == 1
    assert np.array_equal(pixels(encoded(Image.fromarray(bits), format), channels=1), bits * np.uint8(255))


@pytest.mark.parametrize("format", ["PNG", "TIFF", "PPM"])
def test_16_bit_grey_is_scaled_and_not_clipped(format):
    ramp = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    got = pixels(encoded(Image.fromarray(ramp), format), channels=1)
    assert np.array_equal(got, np.round(ramp / 257).astype(np.uint8))
    assert np.abs(got.astype(int) - (ramp >> 8)).max() <= 1
    assert np.array_equal(pixels(encoded(Image.fromarray(ramp), format))[..., 2], got)


def test_big_endian_16_bit_tiff_is_scaled():
    ramp = np.arange(0, 65536, 64, dtype=">u2").reshape(32, 32)
    image = Image.frombytes("I;16B", (32, 32), ramp.tobytes())
    assert np.array_equal(pixels(encoded(image, "TIFF"), channels=1), np.round(ramp / 257).astype(np.uint8))


def test_16_bit_colour_png_keeps_the_high_bytes():
    wide = np.arange(8 * 8 * 3, dtype=np.uint16).reshape(8, 8, 3) * 300
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in wide)
    header = struct.pack(">IIBBBBB", 8, 8, 16, 2, 0, 0, 0)
    chunks = png_chunk(b"IHDR", header) + png_chunk(b"IDAT", zlib.compress(rows)) + png_chunk(b"IEND", b"")
    assert np.abs(pixels(b"\x89PNG\r\n\x1a\n" + chunks).astype(int) - (wide >> 8)).max() <= 1


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG"])
def test_the_first_frame_of_an_animation_is_read(format):
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "lime", "blue")]
    options = {"lossless": True} if format == "WEBP" else {}
    data = encoded(frames[0], format, save_all=True, append_images=frames[1:], **options)
    assert np.array_equal(pixels(data), np.broadcast_to(np.uint8([255, 0, 0]), (8, 8, 3)))


@pytest.mark.parametrize("size", [(1, 1), (1, 5000), (5000, 1)])
def test_extreme_shapes_decode(size):
    assert pixels(encoded(Image.new("RGB", size, "red"), "JPEG")).shape == (size[1], size[0], 3)


@pytest.mark.parametrize(("dtype", "kind"), [(np.float32, "float"), (np.int32, "integer")])
def test_32_bit_samples_raise_with_their_type(dtype, kind):
    image = Image.fromarray(np.ones((4, 4), dtype=dtype))
    assert f"32-bit {kind} samples" in error_message(encoded(image, "TIFF"))


def test_a_decompression_bomb_is_rejected_by_its_header():
    assert "its header says 20000x20000, more than 128,000,000 pixels" in error_message(png_header(20000, 20000))


def test_a_size_between_pillow_s_warning_and_the_limit_is_not_reported_as_a_bomb():
    assert "bomb" not in error_message(png_header(10000, 10000))


@pytest.mark.parametrize("format", ["PNG", "JPEG", "GIF", "BMP", "PPM"])
def test_pillow_s_limit_does_not_apply(format, monkeypatch, color_image):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    assert pixels(encoded(color_image, format)).shape == (16, 24, 3)


@pytest.mark.parametrize("format", ["PNG", "JPEG", "GIF", "BMP", "PPM", "TIFF", "WEBP"])
def test_the_pixel_limit_applies_to_every_format(format, monkeypatch, color_image):
    monkeypatch.setattr(module, "MAX_PIXELS", 24 * 16 - 1)
    assert "its header says 24x16" in error_message(encoded(color_image, format))


def test_an_empty_file_is_reported_as_empty():
    assert error_message(b"") == "/p/x.jpg: is empty (0 bytes); remove it or replace it"


@pytest.mark.parametrize(
    "data", [b"<!DOCTYPE html>\n<html>404</html>", b"\0" * 100, b"garbage", b"%PDF-1.7", b"\x89PNG", b"RIFF1234WAVE"]
)
def test_a_file_that_is_not_an_image_is_reported_with_its_first_bytes(data):
    message = error_message(data)
    assert message.startswith("/p/x.jpg: cannot be decoded: it is not a JPEG, PNG, WebP, BMP, GIF, TIFF, ")
    assert repr(data[:12]) in message


def test_a_truncated_jpeg_is_reported_as_truncated():
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    data = encoded(Image.fromarray(noise), "JPEG")
    message = error_message(data[: len(data) // 2])
    assert message.startswith("/p/x.jpg: cannot be decoded: image file is truncated (")


@pytest.mark.parametrize("format", ["JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP", "PPM"])
def test_every_truncation_of_a_file_decodes_or_raises_a_one_line_error(format, color_image):
    data = encoded(color_image, format)
    refused = 0
    for length in range(len(data)):
        try:
            assert pixels(data[:length]).shape == (16, 24, 3)
        except DataError as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused > len(data) // 4


@pytest.mark.parametrize("format", ["JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP", "PPM"])
def test_damaged_files_neither_warn_nor_raise_anything_else(format, color_image):
    options = {} if format in ("BMP", "GIF", "PPM") else {"exif": exif(6)}
    data = bytearray(encoded(color_image, format, **options))
    random = np.random.default_rng(0)
    for _ in range(300):
        damaged = bytearray(data)
        for position in random.integers(0, len(data), 3):
            damaged[position] = random.integers(0, 256)
        try:
            decode(bytes(damaged), channels=3, name="x")
        except DataError as error:
            assert "Warning" not in type(error.__cause__).__name__, error


def test_the_warning_filters_of_the_process_are_unchanged(color_image):
    before = list(warnings.filters)
    pixels(encoded(color_image, "TIFF"))
    error_message(b"II*\0nonsense")
    assert warnings.filters == before


def test_a_header_has_format_and_upright_size_without_decoding() -> None:
    image, file = Image.new("RGB", (30, 20)), io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    image.save(file, "JPEG", exif=exif, progressive=True)
    assert read_image_header(file.getvalue(), name="x") == ("JPEG, progressive", 30, 20)
    assert read_image_header(file.getvalue()[:300], name="x").format == "JPEG, progressive"


def test_the_header_of_a_file_that_is_not_an_image_raises() -> None:
    with pytest.raises(DataError, match=r"^x\.jpg: cannot be decoded: it is not a JPEG"):
        read_image_header(b"<html>", name="x.jpg")


def segment(marker, content):
    return struct.pack(">BBH", 0xFF, marker, len(content) + 2) + content


def progressive(num_scans, *, before=b"", after=b""):
    """Return a gray progressive JPEG of 64x64 pixels, with empty scans after the first."""
    tables = segment(0xDB, b"\0" + b"\1" * 64)
    tables += segment(0xC2, struct.pack(">BHHB", 8, 64, 64, 1) + b"\1\x11\0")
    tables += segment(0xC4, b"\0" + bytes([0, 1, 5, 1, 1, 1, 1, 1, 1] + [0] * 7) + bytes(range(12)))
    tables += segment(0xC4, b"\x10" + bytes([0, 2, 1, 3, 3, 2, 4, 3, 5, 5, 4, 4, 0, 0, 1, 125]) + bytes(range(162)))
    first = segment(0xDA, b"\1\1\0\0\0\1") + b"\x7f"
    more = segment(0xDA, b"\1\1\0\1\x3f\x10") * (num_scans - 1)
    return b"\xff\xd8" + before + tables + first + more + b"\xff\xd9" + after


def test_a_jpeg_of_more_than_100_scans_is_rejected_before_decoding():
    assert decode(progressive(100), channels=1, name="x").size == (64, 64)
    assert "cannot be decoded: it has more than 100 scans" in error_message(progressive(101))


def test_scans_in_a_thumbnail_or_after_the_end_marker_do_not_count():
    scans = b"\xff\xda" * 200
    data = progressive(2, before=segment(0xE1, b"Exif\0\0" + scans) + segment(0xFE, scans), after=scans)
    assert decode(data, channels=1, name="x").size == (64, 64)


@pytest.mark.parametrize("channels", [1, 3])
def test_16_bit_grey_is_scaled_the_same_in_every_strip(channels):
    wide = np.random.default_rng(0).integers(0, 2**16, (1100, 2001), dtype=np.uint16)
    wide[:2, :2] = [[0, 128], [129, 65535]]
    scaled = ((wide.astype(np.uint32) + 128) // 257).astype(np.uint8)
    data = encoded(Image.fromarray(wide), "PNG", compress_level=1)
    expected = scaled if channels == 1 else np.repeat(scaled[:, :, None], 3, axis=2)
    assert np.array_equal(np.asarray(decode(data, channels=channels, name="x")), expected)


def test_16_bit_grey_takes_less_than_8_bytes_a_pixel():
    """Two decoded and one scaled, then one and four as RGB; 32-bit values would take 14."""
    data = encoded(Image.fromarray(np.zeros((6000, 6000), np.uint16)), "PNG", compress_level=1)
    code = (
        "import sys; from paceline.data.decode import decode; data = sys.stdin.buffer.read()\n"
        "peak = lambda: next(int(line.split()[1]) for line in open('/proc/self/status') if line.startswith('VmHWM'))\n"
        "before = peak(); decode(data, channels=3, name='x'); print(peak() - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], input=data, capture_output=True, check=True, timeout=60)
    assert 5 * 36_000_000 < int(done.stdout) * 1024 < 8 * 36_000_000
