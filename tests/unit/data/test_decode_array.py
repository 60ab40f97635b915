"""Files of any pixel type and up to 16 channels are decoded as they are, or refused in one line."""

import io
import pickle
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
from PIL import Image

from paceline.core.errors import RecipeError
from paceline.core.pixels import PixelFormat
from paceline.data import decode_array as module
from paceline.data import extra_formats
from paceline.data.bad_images import ImageError
from paceline.data.decode_array import decode_image, decode_pixels, encode_pixels, read_header

tifffile = pytest.importorskip("tifffile", reason="not installed: pip install 'paceline[images]'")
imagecodecs = pytest.importorskip("imagecodecs", reason="not installed: pip install 'paceline[images]'")

SHAPE = (6, 9)


def make(dtype: str, channels: int) -> np.ndarray:
    values = np.random.default_rng(channels).random((*SHAPE, channels))
    return values.astype(dtype) if dtype.startswith("float") else (values * np.iinfo(dtype).max).astype(dtype)


def npy(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, pixels)
    return file.getvalue()


def tiff(pixels: np.ndarray, **options) -> bytes:
    file = io.BytesIO()
    tifffile.imwrite(file, pixels, **options)
    return file.getvalue()


def claims(shape) -> bytes:
    file = io.BytesIO()
    header = {"descr": "<u2", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    return file.getvalue() + bytes(1000)


def message_of(data: bytes, form: PixelFormat) -> str:
    with pytest.raises(ImageError) as caught:
        decode_image(data, form, name="/p/x")
    text = str(caught.value)
    assert text.startswith("/p/x: cannot be decoded: ") and text.endswith("; remove it or replace it")
    assert "\n" not in text
    return text


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 5, 13, 16])
@pytest.mark.parametrize("pixels", ["uint8", "uint16", "float32"])
def test_an_array_file_gives_the_pixels_that_were_saved(pixels, channels):
    saved, form = make(pixels, channels), PixelFormat(channels, pixels)
    planes = np.ascontiguousarray(np.moveaxis(saved, 2, 0))
    gray = {"photometric": "minisblack"}
    files = [npy(saved), npy(np.asfortranarray(saved)), npy(saved.astype(saved.dtype.newbyteorder(">")))]
    if not form.is_photo:  # Pillow reads those
        contig, separate = ({"planarconfig": name if channels > 1 else None} for name in ("contig", "separate"))
        files += [tiff(saved, **gray, **contig, compression=name) for name in (None, "zlib", "lzw")]
        files += [tiff(planes, **gray, **separate, tile=(16, 16)), tiff(planes, **gray), tiff(saved, **gray)]
    for number, data in enumerate(files):
        decoded = decode_pixels(data, form, name="")
        assert decoded.dtype == pixels and decoded.flags.c_contiguous
        assert np.array_equal(decoded, saved), number
        assert read_header(data, form, name="")[1:] == SHAPE
    stored = encode_pixels(saved)
    assert stored.startswith(b"\x89PNG" if form.is_photo else b"\x93NUMPY")
    assert np.array_equal(decode_pixels(stored, form, name=""), saved)


def test_gray_arrays_may_lack_the_axis_of_channels():
    saved = make("uint16", 1)
    for data in (npy(saved[..., 0]), tiff(saved[..., 0])):
        assert np.array_equal(decode_pixels(data, PixelFormat(1, "uint16"), name=""), saved)


def test_imagej_channels_are_channels():
    saved = make("uint16", 5)
    data = tiff(np.moveaxis(saved, 2, 0).copy(), imagej=True, metadata={"axes": "CYX"})
    assert np.array_equal(decode_pixels(data, PixelFormat(5, "uint16"), name=""), saved)


def test_8_bit_rgb_arrays_equal_the_png_of_the_same_pixels():
    saved = make("uint8", 3)
    file = io.BytesIO()
    Image.fromarray(saved).save(file, "PNG")
    for data in (npy(saved), file.getvalue()):
        decoded = decode_image(data, PixelFormat(3), name="")
        assert isinstance(decoded, Image.Image) and np.array_equal(np.asarray(decoded), saved)


def test_other_floats_become_float32():
    for kind in ("float16", "float64", ">f8"):
        saved = make("float64", 5).astype(kind)
        decoded = decode_pixels(npy(saved), PixelFormat(5, "float32"), name="")
        assert decoded.dtype == np.float32 and np.array_equal(decoded, saved.astype(np.float32))


@pytest.mark.parametrize("channels", [1, 3])
def test_a_16_bit_png_keeps_its_bits_and_drops_its_alpha(channels):
    saved = make("uint16", channels)
    alpha = np.concatenate([saved, make("uint16", 7)[..., :1]], axis=2)
    form = PixelFormat(channels, "uint16")
    for pixels in (saved, alpha):
        data = imagecodecs.png_encode(np.squeeze(pixels))
        assert np.array_equal(decode_pixels(data, form, name=""), saved)
    assert np.array_equal(decode_pixels(data, PixelFormat(channels + 1, "uint16"), name=""), alpha)


def test_a_16_bit_gray_png_is_what_pillow_decodes():
    saved = make("uint16", 1)
    file = io.BytesIO()
    Image.fromarray(saved[..., 0]).save(file, "PNG")
    assert np.array_equal(decode_pixels(file.getvalue(), PixelFormat(1, "uint16"), name=""), saved)
    # Without `pixels`, the same file has 8 bits.
    assert decode_pixels(file.getvalue(), PixelFormat(1), name="").dtype == np.uint8


@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_orientation_of_png_and_tiff_is_applied_once(orientation):
    saved, exif = make("uint8", 3), Image.Exif()
    exif[0x0112] = orientation
    file = io.BytesIO()
    Image.fromarray(saved).save(file, "PNG", exif=exif.tobytes())
    upright = decode_pixels(file.getvalue(), PixelFormat(3), name="")

    wide = imagecodecs.png_encode(saved.astype(np.uint16) * 257)
    chunk = exif.tobytes().removeprefix(b"Exif\0\0")
    exif_chunk = struct.pack(">I", len(chunk)) + b"eXIf" + chunk + struct.pack(">I", zlib.crc32(b"eXIf" + chunk))
    png = wide[:33] + exif_chunk + wide[33:]  # after the header
    assert np.array_equal(decode_pixels(png, PixelFormat(3, "uint16"), name=""), upright.astype(np.uint16) * 257)

    five = np.concatenate([saved, saved[..., :2]], axis=2)
    tag = [(274, "H", 1, orientation, True)]
    data = tiff(five, photometric="minisblack", planarconfig="contig", extratags=tag)
    assert np.array_equal(decode_pixels(data, PixelFormat(5), name="")[..., :3], upright)


@pytest.mark.parametrize(
    ("data", "form", "parts"),
    [
        (npy(make("uint16", 5)), PixelFormat(5), ("uint16 pixels", "data.source.pixels is uint8")),
        (npy(make("uint8", 5)), PixelFormat(5, "uint16"), ("uint8 pixels", "data.source.pixels is uint16")),
        (npy(make("uint16", 5)), PixelFormat(5, "float32"), ("uint16 pixels", "is float32")),
        (npy(make("uint16", 4)), PixelFormat(5, "uint16"), ("4 channels", "data.source.channels is 5")),
        (npy(make("uint16", 1).astype("int16")), PixelFormat(1, "uint16"), ("int16 pixels",)),
        (npy(np.zeros((3, 0, 2), "u2")), PixelFormat(2, "uint16"), ("[3, 0, 2]",)),
        (npy(np.zeros((2, 3, 4, 5), "u2")), PixelFormat(5, "uint16"), ("[2, 3, 4, 5]",)),
        (npy(make("uint16", 5))[:-1], PixelFormat(5, "uint16"), ("buffer",)),
        (b"\x93NUMPY", PixelFormat(5, "uint16"), ()),
        (claims(tuple(range(1, 4000))), PixelFormat(5, "uint16"), ("header is damaged",)),
        (tiff(make("uint16", 5))[:60], PixelFormat(5, "uint16"), ()),
        (b"\xff\xd8\xff garbage", PixelFormat(5, "uint16"), ("JPEG", "5 channels of uint16")),
        (b"garbage", PixelFormat(5, "uint16"), ("it starts with b'garbage'",)),
    ],
)
def test_other_pixels_and_damaged_files_are_refused(data, form, parts):
    text = message_of(data, form)
    assert all(part in text for part in parts), text


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e300])
def test_a_float_that_is_not_finite_is_refused(value):
    pixels = make("float64", 5)
    pixels[1, 2, 3] = value
    assert "NaN or infinite" in message_of(npy(pixels), PixelFormat(5, "float32"))


class Bomb:
    def __reduce__(self):
        return print, ("unpickled",)


def test_nothing_is_unpickled(capsys):
    data = npy(np.array([[Bomb()]], dtype=object))
    assert b"unpickled" in data and pickle.loads(data[128:]) is not None  # it is a pickle that would print
    capsys.readouterr()
    assert "object" in message_of(data, PixelFormat(1, "uint16"))
    assert not capsys.readouterr().out


def with_tags(values: dict[int, int], **options) -> bytes:
    """Return a TIFF of 6x9 pixels and five channels with other values of tags."""
    data = bytearray(tiff(make("uint16", 5), photometric="minisblack", planarconfig="contig", **options))
    with tifffile.TiffFile(io.BytesIO(bytes(data))) as file:
        tags = {number: file.pages[0].tags[number] for number in values}
    for number, value in values.items():
        struct.pack_into("<H" if tags[number].dtype == 3 else "<I", data, tags[number].valueoffset, value)
    return bytes(data)


def inflating_tiff() -> bytes:
    """Return a TIFF whose only strip inflates to 200 MB."""
    strip = zlib.compress(bytes(200_000_000), 9)
    start = len(with_tags({}, compression="zlib"))
    return with_tags({273: start, 279: len(strip)}, compression="zlib") + strip


def png_header(width: int, height: int, bits: int, color_type: int) -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        checksum = zlib.crc32(kind + content)
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", checksum)

    header = struct.pack(">IIBBBBB", width, height, bits, color_type, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("npy", claims((2**40, 2**40, 5))),
        ("large npy", claims((60_000, 60_000, 5))),
        ("negative npy", claims((-1, 5))),
        ("tile", with_tags({322: 65520, 323: 65520}, tile=(16, 16), compression="zlib")),
        ("strip", inflating_tiff()),
        ("png", png_header(11_000, 11_000, bits=16, color_type=6)),
    ],
)
def test_a_file_that_claims_too_much_is_refused_before_it_takes_memory(name, data):
    tracemalloc.start()
    message = message_of(data, PixelFormat(5, "uint16"))
    assert name == "strip" or "its header says" in message or "not [H, W]" in message
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10_000_000


def test_any_damage_to_a_tiff_is_one_line(capfd):
    data = tiff(make("uint16", 5), photometric="minisblack", planarconfig="contig", compression="zlib")
    draws, num_refused = np.random.default_rng(0), 0
    for _ in range(200):
        damaged = bytearray(data)
        for place, value in zip(draws.integers(len(data), size=3), draws.integers(256, size=3), strict=True):
            damaged[place] = value
        try:
            decode_image(bytes(damaged), PixelFormat(5, "uint16"), name="/p/x")
        except ImageError as error:
            num_refused += 1
            assert len(str(error).splitlines()) == 1
    assert num_refused > 50
    assert capfd.readouterr() == ("", "")


def test_the_limit_counts_the_bytes_of_the_pixels(monkeypatch):
    data, form = npy(make("uint16", 5)), PixelFormat(5, "uint16")
    monkeypatch.setattr(module, "MAX_BYTES", 6 * 9 * 5 * 2)
    assert decode_pixels(data, form, name="").shape == (6, 9, 5)
    monkeypatch.setattr(module, "MAX_BYTES", 6 * 9 * 5 * 2 - 1)
    assert "more than 539 bytes" in message_of(data, form)


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(extra_formats.importlib, "import_module", missing)
    for data in (tiff(make("uint16", 5)), imagecodecs.png_encode(make("uint16", 3))):
        with pytest.raises(RecipeError, match=r"^data\.source: .*imagecodecs.*pip install 'paceline\[images\]'"):
            decode_image(data, PixelFormat(5, "uint16"), name="/p/x")
