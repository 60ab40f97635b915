"""Decode image files to pixels of any type and number of channels: .npy, TIFF, PNG and JPEG XL. Torch-free.

8-bit gray and RGB images are decoded by `data.decode`. Nothing is unpickled. The size in a header is checked before
memory is allocated.
"""

import logging
import math
import re
from collections.abc import Sequence
from functools import cache
from io import BytesIO
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from PIL.PngImagePlugin import PngImageFile

from paceline.core.dataset import PixelArray
from paceline.core.errors import PacelineError
from paceline.core.pixels import PixelFormat, PixelType
from paceline.core.units import count
from paceline.data.decode import (
    MAX_PIXELS,
    NPY_SIGNATURE,
    ImageHeader,
    build_image_error,
    check_size,
    decode,
    detect_format_name,
    get_orientation,
    read_image_header,
)
from paceline.data.extra_formats import (
    CODECS_PACKAGE,
    TIFF_PACKAGE,
    decode_jpeg_xl,
    import_package,
    read_jpeg_xl_size,
)

# As many bytes as the largest 8-bit image takes, which Pillow stores in four bytes per pixel.
MAX_BYTES: Final = 4 * MAX_PIXELS
# TIFF compressions that are bounded by the size of the pixels: none, LZW and Deflate under its two numbers.
_TIFF_COMPRESSIONS: Final = frozenset({1, 5, 8, 32946})
# Of gray, RGB, palette (which may have alpha), gray with alpha, and RGBA.
_PNG_CHANNELS: Final = {0: 1, 2: 3, 3: 4, 4: 2, 6: 4}
_TIFF: Final = re.compile(rb"II[*+]\0|MM\0[*+]")
_ORIENTATION_TAG: Final = 274


def decode_image(data: bytes, form: PixelFormat, *, name: str) -> Image.Image | PixelArray:
    """Decode an image file upright: 8-bit gray or RGB to a PIL image, others to an array [H, W, C] of `form`.

    Raise `ImageError` as `decode`, and for pixels of another type, another number of channels, NaN or infinity. Raise
    `PacelineError` if a package is missing.
    """
    is_npy = data.startswith(NPY_SIGNATURE)
    if form.is_photo and not is_npy:
        return decode(data, channels=1 if form.channels == 1 else 3, name=name)
    try:
        pixels = check_pixels(_read_npy(data) if is_npy else _read_file(data, form), form)
    except PacelineError:
        raise
    except Exception as error:  # as in `decode`
        raise build_image_error(name, error) from error
    return to_image(pixels) if form.is_photo else pixels


def decode_pixels(content: bytes | PixelArray, form: PixelFormat, *, name: str) -> PixelArray:
    """Return the pixels [H, W, C] of a sample's content. Raise as `decode_image`."""
    if not isinstance(content, bytes):
        return content
    pixels = np.asarray(decode_image(content, form, name=name))
    return pixels if pixels.ndim == 3 else pixels[..., None]


def encode_pixels(pixels: PixelArray) -> bytes:
    """Return a file of pixels [H, W, C] without loss: PNG for 8-bit gray or RGB, else .npy."""
    file = BytesIO()
    if PixelFormat(pixels.shape[2], cast(PixelType, pixels.dtype.name)).is_photo:
        to_image(pixels).save(file, "PNG")
    else:
        np.lib.format.write_array(file, pixels, allow_pickle=False)
    return file.getvalue()


def to_image(pixels: PixelArray) -> Image.Image:
    """Convert uint8 [H, W, C], with C of 1 or 3, to an image."""
    return Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)


def read_header(data: bytes, form: PixelFormat, *, name: str) -> ImageHeader:
    """Read the header of an image file, for which only arrays are decoded. Raise as `decode_image`."""
    is_npy = data.startswith(NPY_SIGNATURE)
    if is_npy or (not form.is_photo and _TIFF.match(data)):
        height, width = decode_pixels(data, form, name=name).shape[:2]
        return ImageHeader("NPY" if is_npy else "TIFF", height, width)
    return read_image_header(data, name=name)


def check_pixels(pixels: NDArray[Any], form: PixelFormat) -> PixelArray:
    """Return pixels [H, W] or [H, W, C] as [H, W, C] in the type of `form`; floats become float32.

    Raise `ValueError` for pixels of another type, another number of channels, NaN or infinity.
    """
    pixels = pixels[..., None] if pixels.ndim == 2 else pixels
    _check_size(pixels.shape, pixels.dtype)
    kind, channels = pixels.dtype, pixels.shape[2]
    if not (kind.kind == "f" if form.pixels == "float32" else kind.newbyteorder("=") == form.pixels):
        raise ValueError(f"it has {kind.name} pixels, and data.source.pixels is {form.pixels}")
    if channels != form.channels:
        raise ValueError(f"it has {count(channels, 'channel')}, and data.source.channels is {form.channels}")
    with np.errstate(over="ignore"):  # the next check names what float32 cannot hold
        converted = np.ascontiguousarray(pixels, dtype=form.pixels)
    if kind.kind == "f" and not np.isfinite(converted).all():
        raise ValueError("it has NaN or infinite pixels")
    return converted


def _check_size(shape: Sequence[int], dtype: np.dtype[Any]) -> None:
    if len(shape) not in (2, 3) or min(shape) < 1 or dtype.kind not in "uif":
        raise ValueError(f"it holds {dtype.name} {list(shape)}, not [H, W] or [H, W, C] pixels")
    if math.prod(shape) * dtype.itemsize > MAX_BYTES:
        raise ValueError(f"its header says {dtype.name} {list(shape)}, more than {MAX_BYTES:,} bytes")


def _read_npy(data: bytes) -> NDArray[Any]:
    file = BytesIO(data)
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"it has .npy version {version[0]}.{version[1]}, not 1.0 or 2.0")
    read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    try:
        shape, is_fortran, dtype = read_header(file)
    except ValueError as error:  # numpy's text quotes the header, or suggests to unpickle it
        raise ValueError("its .npy header is damaged") from error
    _check_size(shape, dtype)
    # A view of `data`, which cannot be a pickle: the type is a number.
    return np.frombuffer(data, dtype, math.prod(shape), file.tell()).reshape(shape, order="F" if is_fortran else "C")


def _read_file(data: bytes, form: PixelFormat) -> NDArray[Any]:
    match detect_format_name(data):
        case "TIFF":
            return _read_tiff(data, form)
        case "PNG":
            return _read_png(data, form)
        case "JXL":
            check_size(*read_jpeg_xl_size(data))
            return decode_jpeg_xl(data)
        case other:
            raise ValueError(f"{other} files have 8-bit gray or color pixels, and data.source has {form}")


def _read_png(data: bytes, form: PixelFormat) -> NDArray[Any]:
    header = PngImageFile(BytesIO(data))  # whose pixels are not read: Pillow reduces 16-bit color to 8 bits
    bits, color_type = data[24], data[25]  # of IHDR, which is first
    shape = (*header.size[::-1], _PNG_CHANNELS[color_type])
    _check_size(shape, np.dtype(np.uint16 if bits == 16 else np.uint8))
    pixels: NDArray[Any] = import_package(CODECS_PACKAGE).png_decode(data)
    if pixels.ndim == 3 and pixels.shape[2] == form.channels + 1 and form.channels in (1, 3):
        pixels = pixels[..., :-1]  # alpha, as in 8-bit images
    return _turn_upright(pixels, get_orientation(header))


def _read_tiff(data: bytes, form: PixelFormat) -> NDArray[Any]:
    import_package(CODECS_PACKAGE)  # its decompressors stop at the size of the pixels, those of tifffile do not
    # Without OME-XML, which may name other files.
    with _import_tifffile().TiffFile(BytesIO(data), is_ome=False) as file:
        series, page = file.series[0], file.pages[0]
        _check_size(series.shape, series.dtype)
        _check_size((1, math.prod(page.chunks)), series.dtype)  # a tile may be larger than the image
        if page.compression not in _TIFF_COMPRESSIONS:
            raise ValueError(
                f"its compression {page.compression} is not read (save it with Deflate or LZW, or without)"
            )
        pixels: NDArray[Any] = series.asarray(maxworkers=1)
        if pixels.ndim == 3:
            axis = next((series.axes.index(name) for name in "SC" if name in series.axes), None)
            if axis is None:  # pages or planes may be channels, or tifffile has split [H, W, C]
                axis = 0 if pixels.shape[0] == form.channels else 2
            pixels = np.moveaxis(pixels, axis, -1)
        tag = page.tags.get(_ORIENTATION_TAG)
        return _turn_upright(pixels, int(tag.value) if tag else 1)


@cache
def _import_tifffile() -> Any:
    logging.getLogger("tifffile").addHandler(logging.NullHandler())  # else it prints what is wrong with a file
    return import_package(TIFF_PACKAGE)


def _turn_upright(pixels: NDArray[Any], orientation: int) -> NDArray[Any]:
    """Return pixels [H, W, ...] turned and mirrored by an EXIF orientation, 1 to 8."""
    if orientation in (5, 6, 7, 8):
        pixels = pixels.swapaxes(0, 1)
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return pixels[::-1] if orientation in (3, 4, 7, 8) else pixels
