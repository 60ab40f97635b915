"""Decode image files to 8-bit pixels with Pillow, and read image headers without decoding. Torch-free.

`data.decode_array` decodes pixels of other types. EXIF orientations 1 to 8 are applied. Alpha is dropped, not blended.
Only the first frame of an animation is read. 16-bit gray is scaled to 8 bits; Pillow alone would clip it. Color
profiles are not applied.
"""

import re
import struct
import threading
import warnings
from collections.abc import Callable
from io import BytesIO
from typing import Final, Literal, NamedTuple

import numpy as np
from PIL import Image
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.PpmImagePlugin import PpmImageFile
from PIL.TiffImagePlugin import TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile

from paceline.core.errors import PacelineError
from paceline.data.bad_images import ImageError
from paceline.data.extra_formats import open_avif, open_heif, open_jpeg_xl, read_jpeg_xl_size

# Largest image that is decoded, by its header: 512 MB as RGB, which Pillow stores in four bytes per pixel. Phones make
# up to 108 Mpx; a few kilobytes of PNG can claim thousands of Mpx.
MAX_PIXELS = 128_000_000
# Most scans of a JPEG that is decoded, as in the native extension; encoders write about ten. Pillow walks over all
# blocks for each scan, so 10 kB of empty scans would cost minutes.
MAX_SCANS = 100
# 16-bit pixels that are scaled at a time.
_STRIP_PIXELS = 1 << 20

# JPEG markers: ITU-T T.81, annex B (https://www.w3.org/Graphics/JPEG/itu-t81.pdf).
# Any marker but those inside of a scan (stuffing, fill, RST).
_MARKER = re.compile(rb"\xff[\x01-\xcf\xd8-\xfe]")
START_OF_SCAN: Final = 0xDA
_END_OF_IMAGE: Final = 0xD9
# Markers without a length field: TEM and SOI.
_MARKERS_WITHOUT_LENGTH = {0x01, 0xD8}
EXIF_SIGNATURE: Final = b"Exif\0\0"
NPY_SIGNATURE: Final = b"\x93NUMPY"


class _FileFormat(NamedTuple):
    """A file signature and its Pillow plug-in, which warns only about files with `warning_marker`; None: never."""

    name: str
    signature: re.Pattern[bytes]
    plugin: Callable[[BytesIO], Image.Image]
    warning_marker: bytes | None


# The plug-ins are called directly, not through Image.open: the pixel limit is then not Pillow's process-wide one,
# and a dataset cannot reach Pillow's forty other formats, which are less used and less tested.
_FORMATS = (
    _FileFormat("JPEG", re.compile(rb"\xff\xd8\xff"), JpegImageFile, EXIF_SIGNATURE),
    _FileFormat("PNG", re.compile(rb"\x89PNG\r\n\x1a\n"), PngImageFile, b"acTL"),
    _FileFormat("WebP", re.compile(rb"RIFF.{4}WEBP", re.DOTALL), WebPImageFile, None),
    _FileFormat("BMP", re.compile(rb"BM"), BmpImageFile, None),
    _FileFormat("GIF", re.compile(rb"GIF8[79]a"), GifImageFile, b""),
    _FileFormat("TIFF", re.compile(rb"II\*\0|MM\0\*|II\+\0|MM\0\+"), TiffImageFile, b""),
    _FileFormat("PPM", re.compile(rb"P[1-6f]\s"), PpmImageFile, None),
    _FileFormat("AVIF", re.compile(rb".{4}ftyp(avi[fs]|mif1.{0,32}?avif)", re.DOTALL), open_avif, None),
    _FileFormat("HEIC", re.compile(rb".{4}ftyp(hei[cxms]|hev[cxms]|mif1|msf1)", re.DOTALL), open_heif, None),
    _FileFormat("JXL", re.compile(rb"\xff\x0a|\0\0\0\x0cJXL \r\n\x87\n"), open_jpeg_xl, None),
)
_WARNING_FILTER_LOCK = threading.Lock()
_TRANSPOSE_BY_ORIENTATION = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class ImageHeader(NamedTuple):
    """File format, such as `PNG` or `JPEG, progressive`, and upright height and width in pixels."""

    format: str
    height: int
    width: int


def decode(data: bytes, *, channels: Literal[1, 3], name: str, smallest: int = 0) -> Image.Image:
    """Decode a file of one of `_FORMATS` upright, to mode `L` for 1 channel or `RGB` for 3.

    With `smallest`, a JPEG may be decoded at an eighth, a quarter or half of its size, but not below so many pixels.

    Raise `ImageError`, with `name`, if the file is empty, broken, of another format, larger than `MAX_PIXELS`, or has
    32-bit samples, and `RecipeError` if a package is missing.
    """
    if not data:
        raise ImageError(name, "is empty (0 bytes)", "remove it or replace it")
    try:
        file = _load_pixels(data, smallest)
        transpose = _TRANSPOSE_BY_ORIENTATION.get(get_orientation(file))
        image = _convert_mode(file, "L" if channels == 1 else "RGB")
        return image if transpose is None else image.transpose(transpose)
    except PacelineError:
        raise
    except Exception as error:  # a broken file makes Pillow raise nearly anything, SyntaxError included
        raise build_image_error(name, error) from error


def read_image_header(data: bytes, *, name: str) -> ImageHeader:
    """Read the header of an image file without decoding it. Raise `ImageError` as `decode` does."""
    try:
        with _WARNING_FILTER_LOCK, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            file = _open(_detect_format(data), data)
        is_on_its_side = get_orientation(file) >= 5
        width, height = reversed(file.size) if is_on_its_side else file.size
        form = f"{file.format}{', progressive' if file.info.get('progressive') else ''}"
        return ImageHeader(form, height, width)
    except PacelineError:
        raise
    except Exception as error:  # as in `decode`
        raise build_image_error(name, error) from error


def build_image_error(name: str, error: Exception) -> ImageError:
    """Build the error for an image `name` that cannot be decoded."""
    reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return ImageError(name, f"cannot be decoded: {reason}", "remove it or replace it")


def _load_pixels(data: bytes, smallest: int) -> Image.Image:
    kind = _detect_format(data)
    if kind.plugin is JpegImageFile and _has_more_scans(data, MAX_SCANS):
        raise ValueError(f"it has more than {MAX_SCANS} scans")
    if kind.warning_marker is None or kind.warning_marker not in data:
        image = _open(kind, data)
    else:
        # Ignore warnings about metadata that is not used. Warning filters are process-wide: one thread at a time.
        with _WARNING_FILTER_LOCK, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image = _open(kind, data)
            if kind.plugin is not JpegImageFile:  # which warns only about the header, so it decodes without the lock
                image.load()
    if smallest:
        image.draft(None, (smallest, smallest))  # does nothing but for JPEG
    image.load()
    return image


def _has_more_scans(data: bytes, limit: int) -> bool:
    if data.count(b"\xff\xda") <= limit:  # fast, and never too low: thumbnails and trailing data count as well
        return False
    num_scans = offset = 0
    while match := _MARKER.search(data, offset):
        marker, offset = data[match.end() - 1], match.end()
        if marker == _END_OF_IMAGE:  # what follows, such as the video of a motion photo, is not decoded
            break
        num_scans += marker == START_OF_SCAN
        if num_scans > limit:
            return True
        if marker not in _MARKERS_WITHOUT_LENGTH:  # skip the segment: it may hold a thumbnail with scans of its own
            offset += int.from_bytes(data[offset : offset + 2])
    return False


def _detect_format(data: bytes) -> _FileFormat:
    kind = next((kind for kind in _FORMATS if kind.signature.match(data)), None)
    if kind is None:
        names = f"{', '.join(each.name for each in _FORMATS[:-1])} or {_FORMATS[-1].name}"
        raise ValueError(f"it is not a {names} file (it starts with {data[:12]!r})")
    return kind


def detect_format_name(data: bytes) -> str:
    """Return the name of a file's format, such as `PNG`. Raise `ValueError` for one that is not read."""
    return _detect_format(data).name


def _open(kind: _FileFormat, data: bytes) -> Image.Image:
    if kind.plugin is open_jpeg_xl:  # which decodes at once
        check_size(*read_jpeg_xl_size(data))
    return _check_header(kind.plugin(BytesIO(data)))


def check_size(width: int, height: int) -> None:
    """Raise `ValueError` for an image of more than `MAX_PIXELS`."""
    if width * height > MAX_PIXELS:
        raise ValueError(f"its header says {width}x{height}, more than {MAX_PIXELS:,} pixels")


def _check_header(image: Image.Image) -> Image.Image:
    check_size(*image.size)
    if image.mode == "F" or (image.mode == "I" and image.format == "TIFF"):
        kind = "float" if image.mode == "F" else "integer"
        raise ValueError(f"it has 32-bit {kind} samples, whose range is not known (save it with 8 or 16 bits)")
    return image


def _convert_mode(image: Image.Image, mode: Literal["L", "RGB"]) -> Image.Image:
    if image.mode.startswith("I"):
        gray = _scale_16_bit(image)
        return gray if mode == "L" else gray.convert(mode)
    # Pillow would carry a transparent color over to the new mode, and warn if it cannot.
    image.info.pop("transparency", None)
    return image if image.mode == mode else image.convert(mode)


def _scale_16_bit(image: Image.Image) -> Image.Image:
    # In strips: with the 32-bit values of all 128 Mpx at once this took 1.75 GB, and takes 660 MB (measured, as RGB).
    width, height = image.size
    gray = np.empty((height, width), np.uint8)
    num_rows = max(1, _STRIP_PIXELS // width)
    for top in range(0, height, num_rows):
        bottom = min(top + num_rows, height)
        wide = np.asarray(image.crop((0, top, width, bottom))).astype(np.uint32)
        wide += 128  # 65535 / 257 = 255; adding half the divisor rounds to nearest
        wide //= 257
        gray[top:bottom] = wide
    image.close()  # frees the 16-bit pixels before the caller converts to RGB
    return Image.frombuffer("L", (width, height), gray, "raw", "L", 0, 1)


def get_orientation(image: Image.Image) -> int:
    """Return the EXIF orientation of an opened image, 1 to 8, or 1 if it is absent or invalid."""
    return read_orientation(image.info.get("exif") or b"")  # pillow-heif writes None for a file without EXIF


def read_orientation(exif: bytes) -> int:
    """Return the orientation (tag 0x0112) of an EXIF block, or 1 if it is absent or invalid."""
    # Pillow's own reader parses every tag, and warns or raises about broken ones that do not matter here.
    tiff = exif.removeprefix(EXIF_SIGNATURE)
    order = {b"II": "<", b"MM": ">"}.get(tiff[:2])
    if order is None:
        return 1
    try:
        (start,) = struct.unpack_from(f"{order}I", tiff, 4)
        (num_tags,) = struct.unpack_from(f"{order}H", tiff, start)
        for position in range(start + 2, start + 2 + 12 * num_tags, 12):
            tag, kind = struct.unpack_from(f"{order}HH", tiff, position)
            if tag == 0x0112:
                return int(struct.unpack_from(f"{order}{'I' if kind == 4 else 'H'}", tiff, position + 8)[0])
    except struct.error:
        pass
    return 1
