"""What the header of a JPEG file says that a decoder on a device must know, and does not tell: read, never decoded.

The markers are those of ITU-T T.81, annex B (https://www.w3.org/Graphics/JPEG/itu-t81.pdf).
"""

import struct
from typing import Final, NamedTuple

_START: Final = b"\xff\xd8"
_BASELINE: Final = frozenset({0xC0, 0xC1, 0xC2})
"""Frames that are baseline, extended or progressive, of Huffman codes: what decoders know."""
_SCAN: Final = 0xDA
_APP1: Final = 0xE1
_EXIF: Final = b"Exif\0\0"
_APP14: Final = 0xEE
_ADOBE: Final = b"Adobe"
_TRANSFORM: Final = 11
"""Where Adobe's segment says how colours are stored; 0: as they are (ITU-T T.872, 6.5.3,
https://www.itu.int/rec/T-REC-T.872)."""


class Jpeg(NamedTuple):
    """Height and width in pixels as stored, the number of colour components, and the EXIF block, or nothing.

    `is_rgb` says that the colours may be stored as red, green and blue, not as luminance and two differences.
    """

    height: int
    width: int
    components: int
    exif: bytes
    is_rgb: bool = False


def jpeg_header(data: bytes) -> Jpeg | None:
    """Return what `data` says of itself; None where it is no JPEG of 8 bits a sample, or its header is damaged."""
    if not data.startswith(_START):
        return None
    at, exif, is_rgb = len(_START), b"", False
    try:
        while data[at] == 0xFF:
            marker = data[at + 1]
            if marker == 0xFF:  # any number of them may stand before a marker
                at += 1
                continue
            if marker == _SCAN:
                return None
            (length,) = struct.unpack_from(">H", data, at + 2)
            body = data[at + 4 : at + 2 + length]
            if marker in _BASELINE:
                bits, height, width, components = struct.unpack_from(">BHHB", body)
                is_rgb |= body[6:15:3] == b"RGB"  # the names of the components
                return Jpeg(height, width, components, exif, is_rgb and components == 3) if bits == 8 else None
            if marker == _APP1 and body.startswith(_EXIF) and not exif:
                exif = body
            is_rgb |= marker == _APP14 and body.startswith(_ADOBE) and body[_TRANSFORM:][:1] == b"\0"
            at += 2 + length
    except (IndexError, struct.error):
        pass
    return None
