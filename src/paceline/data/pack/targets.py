"""A table of targets as text in the metadata of a pack: rows of float32, compressed by zlib, in base64."""

import base64
import binascii
import zlib
from typing import Final

import numpy as np

from paceline.core.dataset import TargetTable

# A table of ImageNet's size with soft labels has 5 GB, far more than the metadata of a pack.
_MAX_TABLE_BYTES: Final = 1 << 28


def encode_targets(table: TargetTable) -> str:
    """Return the table as text, the same for equal tables."""
    rows = np.ascontiguousarray(table.rows, dtype="<f4").tobytes()
    return base64.b64encode(zlib.compress(rows, level=9)).decode()


def decode_targets(text: str, num_classes: int) -> TargetTable:
    """Return the table of `encode_targets`. Raise `ValueError` for anything but rows of `num_classes` shares."""
    try:
        unpacker = zlib.decompressobj()
        content = unpacker.decompress(base64.b64decode(text, validate=True), _MAX_TABLE_BYTES)
    except (binascii.Error, zlib.error) as error:
        raise ValueError("it is not a table of targets") from error
    if not unpacker.eof or not content or len(content) % (4 * num_classes):
        raise ValueError(f"its table of targets does not have rows of {num_classes} classes")
    rows = np.frombuffer(content, dtype="<f4").reshape(-1, num_classes)
    if not ((rows >= 0) & (rows <= 1)).all():
        raise ValueError("its table of targets has values outside 0 to 1")
    return TargetTable(rows)
