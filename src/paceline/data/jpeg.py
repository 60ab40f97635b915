"""Parse the JPEG header fields that a device decoder does not report: orientation, color space and size. Torch-free.

Markers: ITU-T T.81, annex B (https://www.w3.org/Graphics/JPEG/itu-t81.pdf).
"""

import struct
from typing import Final, NamedTuple

_JPEG_START: Final = b"\xff\xd8"
# Start-of-frame markers that decoders support: baseline, extended and progressive with Huffman coding.
_SUPPORTED_FRAMES: Final = frozenset({0xC0, 0xC1, 0xC2})
_START_OF_SCAN: Final = 0xDA
_APP1: Final = 0xE1
_EXIF_SIGNATURE: Final = b"Exif\0\0"
_APP14: Final = 0xEE
_ADOBE_SIGNATURE: Final = b"Adobe"
# Offset of the color transform in Adobe's segment; 0: stored without one (ITU-T T.872, 6.5.3,
# https://www.itu.int/rec/T-REC-T.872).
_ADOBE_TRANSFORM_OFFSET: Final = 11


class JpegHeader(NamedTuple):
    """Stored height and width in pixels, number of color components, and the EXIF block or b"".

    `is_rgb`: the colors may be stored as RGB, not as luminance and two differences.
    """

    height: int
    width: int
    components: int
    exif: bytes
    is_rgb: bool = False


def parse_jpeg_header(data: bytes) -> JpegHeader | None:
    """Parse a JPEG header; return None if `data` is not a JPEG with 8 bits per sample, or its header is damaged."""
    if not data.startswith(_JPEG_START):
        return None
    at, exif, is_rgb = len(_JPEG_START), b"", False
    try:
        while data[at] == 0xFF:
            marker = data[at + 1]
            if marker == 0xFF:  # fill bytes may precede a marker
                at += 1
                continue
            if marker == _START_OF_SCAN:
                return None
            (length,) = struct.unpack_from(">H", data, at + 2)
            body = data[at + 4 : at + 2 + length]
            if marker in _SUPPORTED_FRAMES:
                bits, height, width, components = struct.unpack_from(">BHHB", body)
                is_rgb |= body[6:15:3] == b"RGB"  # the names of the components
                return JpegHeader(height, width, components, exif, is_rgb and components == 3) if bits == 8 else None
            if marker == _APP1 and body.startswith(_EXIF_SIGNATURE) and not exif:
                exif = body
            is_rgb |= (
                marker == _APP14 and body.startswith(_ADOBE_SIGNATURE) and body[_ADOBE_TRANSFORM_OFFSET:][:1] == b"\0"
            )
            at += 2 + length
    except (IndexError, struct.error):
        pass
    return None
