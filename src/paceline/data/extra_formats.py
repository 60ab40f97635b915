"""Open HEIC, AVIF and JPEG XL with the packages of the extra `images`; nothing is registered in Pillow. Torch-free."""

import importlib
from collections.abc import Iterable
from io import BytesIO
from typing import Any, Final, cast

import numpy as np
from PIL import Image

from paceline.core.errors import RecipeError
from paceline.core.pixels import PixelFormat

HEIF_PACKAGE: Final = "pillow_heif"
CODECS_PACKAGE: Final = "imagecodecs"
TIFF_PACKAGE: Final = "tifffile"
_PACKAGES_BY_EXTENSION: Final = {"heic": (HEIF_PACKAGE,), "heif": (HEIF_PACKAGE,), "jxl": (CODECS_PACKAGE,)}
_PACKAGES_OF_ARRAYS: Final = {
    "png": (CODECS_PACKAGE,),
    "tif": (TIFF_PACKAGE, CODECS_PACKAGE),
    "tiff": (TIFF_PACKAGE, CODECS_PACKAGE),
}

# The header of a JPEG XL codestream ends its size within this many bytes (ISO/IEC 18181-1, SizeHeader).
_JXL_SIZE_BYTES: Final = 11
_JXL_CODESTREAM: Final = b"\xff\x0a"
_JXL_RATIOS: Final = ((1, 1), (12, 10), (4, 3), (3, 2), (16, 9), (5, 4), (2, 1))


def import_package(name: str) -> Any:
    """Return a package of the extra `images`. Raise `RecipeError` if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise RecipeError(
            f"data.source: its images need the package {package}, which is not installed (pip install "
            f"'paceline[images]', or remove them)"
        ) from error


def require_decoders(extensions: Iterable[str], form: PixelFormat) -> None:
    """Raise `RecipeError` if files with one of `extensions`, in lower case, need a package that is not installed."""
    for extension in sorted(extensions):
        packages = _PACKAGES_BY_EXTENSION.get(extension) or (
            () if form.is_photo else _PACKAGES_OF_ARRAYS.get(extension, ())
        )
        for package in packages:
            import_package(package)
        if extension == "avif":
            _import_avif()


def open_heif(file: BytesIO) -> Image.Image:
    """Open a HEIC or HEIF file; its pixels are decoded by `load`."""
    # libheif turns the image upright, and the plug-in then resets the orientation in the EXIF block.
    return cast(Image.Image, import_package(f"{HEIF_PACKAGE}.as_plugin").HeifImageFile(file))


def open_avif(file: BytesIO) -> Image.Image:
    """Open an AVIF file; its pixels are decoded by `load`."""
    # Pillow translates the rotation of the file to an orientation in the EXIF block.
    return cast(Image.Image, _import_avif().AvifImageFile(file))


def _import_avif() -> Any:
    plugin = import_package("PIL.AvifImagePlugin")
    if not plugin.SUPPORTED:
        raise RecipeError("data.source: its images need a Pillow with AVIF (pip install 'paceline[images]')")
    return plugin


def open_jpeg_xl(file: BytesIO) -> Image.Image:
    """Decode a JPEG XL file, whose size is known to be in the limits, to mode L, LA, RGB, RGBA or I;16."""
    pixels = decode_jpeg_xl(file.getvalue())
    if pixels.dtype == np.uint16 and pixels.ndim == 3:  # Pillow has 16 bits for gray alone
        scaled = np.empty(pixels.shape, np.uint8)
        for row, wide in zip(scaled, pixels, strict=True):  # 32 bits for all rows would take gigabytes
            row[:] = (wide.astype(np.uint32) + 128) // 257
        pixels = scaled
    image = Image.fromarray(pixels)
    image.format = "JXL"
    return image


def decode_jpeg_xl(data: bytes) -> np.ndarray[Any, Any]:
    """Return the first frame of a JPEG XL file upright, [H, W] or [H, W, C] of its own type."""
    # libjxl turns the image upright; the EXIF block, which says so a second time, is not used.
    return cast(np.ndarray[Any, Any], import_package(CODECS_PACKAGE).jpegxl_decode(data, index=0, numthreads=1))


def read_jpeg_xl_size(data: bytes) -> tuple[int, int]:
    """Return (width, height), before orientation, of a JPEG XL file. Raise `ValueError` for a damaged header."""
    start = 0 if data.startswith(_JXL_CODESTREAM) else _find_codestream(data)
    head = data[start : start + _JXL_SIZE_BYTES]
    if not head.startswith(_JXL_CODESTREAM) or len(head) < _JXL_SIZE_BYTES:
        raise ValueError("its JPEG XL header is damaged")
    bits = int.from_bytes(head[2:], "little")

    def take(num: int) -> int:
        nonlocal bits
        value = bits & ((1 << num) - 1)
        bits >>= num
        return value

    def take_side() -> int:
        return 8 * (1 + take(5)) if is_small else 1 + take((9, 13, 18, 30)[take(2)])

    is_small = take(1)
    height = take_side()
    ratio = take(3)
    if ratio == 0:
        return take_side(), height
    numerator, denominator = _JXL_RATIOS[ratio - 1]
    return height * numerator // denominator, height


def _find_codestream(data: bytes) -> int:
    """Return the offset of the codestream in the first box that holds it (ISO/IEC 18181-2)."""
    start = 0
    while start + 8 <= len(data):
        length, kind, header = int.from_bytes(data[start : start + 4]), data[start + 4 : start + 8], 8
        if length == 1:
            length, header = int.from_bytes(data[start + 8 : start + 16]), 16
        if kind in (b"jxlc", b"jxlp"):
            return start + header + (4 if kind == b"jxlp" else 0)  # a part begins with its number
        if length < header:  # 0: the last box
            break
        start += length
    raise ValueError("it has no JPEG XL codestream")
