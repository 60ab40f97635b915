"""From the bytes of an image file to 8-bit pixels: what Pillow leaves to its caller, decided once. Torch-free.

EXIF orientation is applied, and ignored where it is not one of 1..8. Alpha is dropped: what shows is the colour
stored below it, not a blend with a background. Of an animation the first frame counts. 16-bit grey is scaled to
8 bits; Pillow alone would clip it. Colour profiles are not applied. Sizing is not done here.
"""

import re
import struct
import threading
import warnings
from io import BytesIO
from typing import Literal, NamedTuple

import numpy as np
from PIL import Image
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.PpmImagePlugin import PpmImageFile
from PIL.TiffImagePlugin import TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile

from paceline.data.bad import ImageError

MAX_PIXELS = 128_000_000
"""The largest image that is decoded, by its header: 512 MB as RGB, held as four bytes per pixel. A phone's largest mode
makes 108 Mpx; a few kilobytes of PNG can claim thousands of Mpx."""
MAX_SCANS = 100
"""The most scans of a JPEG that is decoded, as in the native decoder: encoders write ten. Pillow walks over all blocks
for each, so that 10 kB of empty scans cost minutes."""
_STRIP_PIXELS = 1 << 20
_MARKER = re.compile(rb"\xff[\x01-\xcf\xd8-\xfe]")
_SOS, _EOI = 0xDA, 0xD9
_ALONE = {0x01, 0xD8}
"""JPEG markers without a length: TEM and SOI. `_MARKER` leaves out those that end no scan: stuffing, fill and RST."""


class _Kind(NamedTuple):
    """A file format. Pillow can warn about a file that contains `warns_at`; `None`: about no file."""

    signature: re.Pattern[bytes]
    plugin: type[ImageFile]
    warns_at: bytes | None


# The plug-ins are called directly, not through Image.open: the pixel limit is then ours and not Pillow's global,
# and its forty other formats, rarely read and rarely checked, are out of reach of a data set.
_KINDS = (
    _Kind(re.compile(rb"\xff\xd8\xff"), JpegImageFile, b"Exif\0\0"),
    _Kind(re.compile(rb"\x89PNG\r\n\x1a\n"), PngImageFile, b"acTL"),
    _Kind(re.compile(rb"RIFF.{4}WEBP", re.DOTALL), WebPImageFile, None),
    _Kind(re.compile(rb"BM"), BmpImageFile, None),
    _Kind(re.compile(rb"GIF8[79]a"), GifImageFile, b""),
    _Kind(re.compile(rb"II\*\0|MM\0\*|II\+\0|MM\0\+"), TiffImageFile, b""),
    _Kind(re.compile(rb"P[1-6f]\s"), PpmImageFile, None),
)
_SILENCE = threading.Lock()
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class Look(NamedTuple):
    """What the header of a file says: `JPEG`, `JPEG, progressive` or `PNG`, and height and width in pixels, upright."""

    form: str
    height: int
    width: int


def decode(data: bytes, *, channels: Literal[1, 3], name: str) -> Image.Image:
    """Return the image in an encoded file: mode `L` for 1 channel, `RGB` for 3, upright, 8 bits a sample.

    Reads JPEG, PNG, WebP, BMP, GIF, TIFF, PPM and PGM. `name` is what the messages call the file. Raise `ImageError`
    for a file that is empty, broken or none of these, larger than `MAX_PIXELS`, or of 32-bit samples.
    """
    if not data:
        raise ImageError(name, "is empty (0 bytes)", "remove it or replace it")
    try:
        file = _load(data)
        turn = _TURNS.get(orientation(file.info.get("exif", b"")))
        image = _convert(file, "L" if channels == 1 else "RGB")
        return image if turn is None else image.transpose(turn)
    except Exception as error:  # a broken file makes Pillow raise nearly anything, SyntaxError included
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise ImageError(name, f"cannot be decoded: {reason}", "remove it or replace it") from error


def look(data: bytes, *, name: str) -> Look:
    """Return what the header of an encoded file says, without decoding it. Raise `ImageError` as `decode` does."""
    try:
        with _SILENCE, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            file = _checked(_kind_of(data).plugin(BytesIO(data)))
        is_on_its_side = orientation(file.info.get("exif", b"")) >= 5
        width, height = reversed(file.size) if is_on_its_side else file.size
        form = f"{file.format}{', progressive' if file.info.get('progressive') else ''}"
        return Look(form, height, width)
    except Exception as error:  # as for `decode`
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise ImageError(name, f"cannot be decoded: {reason}", "remove it or replace it") from error


def _load(data: bytes) -> ImageFile:
    kind = _kind_of(data)
    if kind.plugin is JpegImageFile and _has_more_scans(data, MAX_SCANS):
        raise ValueError(f"it has more than {MAX_SCANS} scans")
    if kind.warns_at is None or kind.warns_at not in data:
        image = _checked(kind.plugin(BytesIO(data)))
    else:
        # Warnings about metadata that is not used. The filters belong to the process: one thread at a time.
        with _SILENCE, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image = _checked(kind.plugin(BytesIO(data)))
            if kind.plugin is not JpegImageFile:  # it warns in its header only, and may decode in parallel
                image.load()
    image.load()
    return image


def _has_more_scans(data: bytes, most: int) -> bool:
    """Whether a JPEG has more than `most` scans, before its end; what follows, such as a video, does not count."""
    if data.count(b"\xff\xda") <= most:
        return False
    num_scans = at = 0
    while found := _MARKER.search(data, at):
        marker, at = data[found.end() - 1], found.end()
        if marker == _EOI:
            break
        num_scans += marker == _SOS
        if num_scans > most:
            return True
        if marker not in _ALONE:  # a thumbnail in a segment has scans of its own
            at += int.from_bytes(data[at : at + 2])
    return False


def _kind_of(data: bytes) -> _Kind:
    kind = next((kind for kind in _KINDS if kind.signature.match(data)), None)
    if kind is None:
        raise ValueError(f"it is not a JPEG, PNG, WebP, BMP, GIF, TIFF or PPM file (it starts with {data[:12]!r})")
    return kind


def _checked(image: ImageFile) -> ImageFile:
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise ValueError(f"its header says {width}x{height}, more than {MAX_PIXELS:,} pixels")
    if image.mode == "F" or (image.mode == "I" and image.format == "TIFF"):
        kind = "float" if image.mode == "F" else "integer"
        raise ValueError(f"it has 32-bit {kind} samples, whose range is not known (save it with 8 or 16 bits)")
    return image


def _convert(image: ImageFile, mode: Literal["L", "RGB"]) -> Image.Image:
    if image.mode.startswith("I"):
        grey = _scaled(image)
        return grey if mode == "L" else grey.convert(mode)
    # Pillow would carry a transparent colour over to the new mode, and warn where it cannot.
    image.info.pop("transparency", None)
    return image if image.mode == mode else image.convert(mode)


def _scaled(image: Image.Image) -> Image.Image:
    """Return 16-bit grey as 8 bits, and close `image`."""
    # In strips: whole, the numbers of 32 bits took 1.75 GB for 128 Mpx, and now all takes 660 MB as RGB (measured).
    width, height = image.size
    grey = np.empty((height, width), np.uint8)
    num_rows = max(1, _STRIP_PIXELS // width)
    for top in range(0, height, num_rows):
        bottom = min(top + num_rows, height)
        wide = np.asarray(image.crop((0, top, width, bottom))).astype(np.uint32)
        wide += 128
        wide //= 257
        grey[top:bottom] = wide
    image.close()
    return Image.frombuffer("L", (width, height), grey, "raw", "L", 0, 1)


def orientation(exif: bytes) -> int:
    """Return the value of tag 0x0112 of an EXIF block, or 1 where it has none or makes no sense.

    Pillow's own reader parses every tag, and warns and raises about broken ones that do not matter here.
    """
    tiff = exif.removeprefix(b"Exif\0\0")
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
