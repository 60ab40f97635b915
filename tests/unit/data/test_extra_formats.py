"""HEIC, AVIF and JPEG XL are decoded upright, once, by the packages of the extra `images`."""

import io
import struct
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from paceline.core.errors import RecipeError
from paceline.core.pixels import PixelFormat
from paceline.data import decode as module
from paceline.data import extra_formats
from paceline.data.bad_images import ImageError
from paceline.data.decode import decode, read_image_header
from paceline.data.decode_array import decode_pixels
from paceline.data.extra_formats import read_jpeg_xl_size, require_decoders

imagecodecs = pytest.importorskip("imagecodecs", reason="not installed: pip install 'paceline[images]'")
heif = pytest.importorskip("pillow_heif.as_plugin", reason="not installed: pip install 'paceline[images]'")
avif = pytest.importorskip("PIL.AvifImagePlugin", reason="this Pillow has no AVIF")

WIDTH, HEIGHT = 64, 40


def scene() -> Image.Image:
    """Return smooth colors, different in each corner."""
    x, y = np.meshgrid(np.arange(WIDTH), np.arange(HEIGHT))
    return Image.fromarray(np.stack([x * 3, y * 5, 255 - x * 2 - y * 2], axis=-1).astype(np.uint8))


def exif(orientation: int) -> bytes:
    block = Image.Exif()
    block[0x0112] = orientation
    return block.tobytes()


def encode(kind: str, image: Image.Image, orientation: int | None = None) -> bytes:
    file = io.BytesIO()
    block = {} if orientation is None else {"exif": exif(orientation)}
    match kind:
        case "heic":
            from pillow_heif import register_heif_opener

            register_heif_opener()
            image.save(file, "HEIF", quality=-1, chroma=444, **block)  # as a rotation of the file
        case "avif":
            image.save(file, "AVIF", quality=100, subsampling="4:4:4", **block)
        case "jxl":
            return imagecodecs.jpegxl_encode(np.asarray(image), lossless=True)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["heic", "avif", "jxl"])
def test_the_pixels_are_those_that_were_saved(kind):
    image = scene()
    decoded = np.asarray(decode(encode(kind, image), channels=3, name=""), dtype=int)
    assert np.abs(decoded - np.asarray(image)).max() <= (0 if kind == "jxl" else 3)
    assert decode(encode(kind, image), channels=1, name="").mode == "L"
    assert read_image_header(encode(kind, image), name="")[1:] == (HEIGHT, WIDTH)


@pytest.mark.parametrize("kind", ["heic", "avif"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_orientation_is_applied_once(kind, orientation):
    image = scene()
    file = io.BytesIO()
    image.save(file, "PNG", exif=exif(orientation))
    expected = np.asarray(decode(file.getvalue(), channels=3, name=""), dtype=int)

    decoded = decode(encode(kind, image, orientation), channels=3, name="")

    assert decoded.size[::-1] == expected.shape[:2]
    assert np.abs(np.asarray(decoded, dtype=int) - expected).max() <= 3


@pytest.mark.parametrize("kind", ["heic", "avif", "jxl"])
def test_alpha_is_dropped(kind):
    image = scene()
    image.putalpha(Image.linear_gradient("L").resize(image.size))
    decoded = np.asarray(decode(encode(kind, image), channels=3, name=""), dtype=int)
    assert np.abs(decoded - np.asarray(scene())).max() <= (0 if kind == "jxl" else 3)


def test_jpeg_xl_of_16_bits_keeps_them_or_is_scaled():
    wide = np.asarray(scene()).astype(np.uint16) * 257
    data = imagecodecs.jpegxl_encode(wide, lossless=True)
    assert np.array_equal(decode_pixels(data, PixelFormat(3, "uint16"), name=""), wide)
    assert np.array_equal(np.asarray(decode(data, channels=3, name="")), np.asarray(scene()))

    values = np.arange(1 << 16, dtype=np.uint16).reshape(256, 256, 1).repeat(3, axis=2)
    scaled = decode(imagecodecs.jpegxl_encode(values, lossless=True), channels=3, name="")
    assert np.array_equal(np.asarray(scaled), np.rint(values / 257).astype(np.uint8))


@pytest.mark.parametrize("size", [(1, 1), (8, 8), (256, 256), (64, 40), (3, 5000), (160, 120), (1280, 720), (257, 255)])
def test_the_size_of_a_jpeg_xl_file_is_read_from_its_header(size):
    bare = imagecodecs.jpegxl_encode(np.zeros(size[::-1], np.uint8))
    boxed = imagecodecs.jpegxl_encode(np.zeros(size[::-1], np.uint8), usecontainer=True)
    assert bare.startswith(b"\xff\x0a") and boxed.startswith(b"\0\0\0\x0cJXL ")
    part = struct.pack(">I4sI", 12 + len(bare), b"jxlp", 2**31) + bare
    for data in (bare, boxed, boxed[:12] + part):
        assert read_jpeg_xl_size(data) == size


@pytest.mark.parametrize("kind", ["heic", "avif", "jxl"])
def test_the_pixel_limit_is_checked_before_decoding(kind, monkeypatch):
    data = encode(kind, scene())
    monkeypatch.setattr(module, "MAX_PIXELS", WIDTH * HEIGHT - 1)
    monkeypatch.setattr(extra_formats, "decode_jpeg_xl", pytest.fail)
    monkeypatch.setattr(heif.HeifImageFile, "load", pytest.fail)
    monkeypatch.setattr(avif.AvifImageFile, "load", pytest.fail)
    with pytest.raises(ImageError, match=f"/p/x: .* its header says {WIDTH}x{HEIGHT}, more than"):
        decode(data, channels=3, name="/p/x")


@pytest.mark.parametrize("kind", ["heic", "avif", "jxl"])
def test_a_damaged_file_is_named(kind):
    data = encode(kind, scene())
    for broken in (data[: len(data) // 2], data[:16]):
        with pytest.raises(ImageError, match=r"^/p/x: cannot be decoded: "):
            decode(broken, channels=3, name="/p/x")


@pytest.mark.parametrize(
    ("extension", "form", "package"),
    [
        ("heic", PixelFormat(3), "pillow_heif"),
        ("jxl", PixelFormat(3), "imagecodecs"),
        ("tif", PixelFormat(5), "tifffile"),
        ("png", PixelFormat(3, "uint16"), "imagecodecs"),
        ("jpg", PixelFormat(3), ""),
        ("tif", PixelFormat(3), ""),
        ("npy", PixelFormat(5), ""),
    ],
)
def test_a_missing_package_is_named_before_the_run(extension, form, package, monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(extra_formats.importlib, "import_module", missing)
    if not package:
        return require_decoders([extension], form)
    with pytest.raises(RecipeError, match=rf"^data\.source: .* {package}, .*pip install 'paceline\[images\]'"):
        require_decoders([extension], form)
    return None


def test_nothing_is_registered_in_pillow():
    code = (
        "from PIL import Image; from paceline.data.extra_formats import require_decoders;"
        "from paceline.core.dataset import PixelFormat;"
        "require_decoders(['heic', 'jxl', 'avif'], PixelFormat(3));"
        "assert not {'HEIF', 'JXL', 'JPEG XL'} & set(Image.OPEN), Image.OPEN"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
