"""Folders of thumbnails in a run directory, which are replaced as a whole."""

import base64
import contextlib
import shutil
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

MAX_UNSCALED_SIDE: Final = 64
"""Longest side, in pixels, of an image that is saved unchanged. Larger images are downscaled."""
_PERCENTILES: Final = (2, 98)
_JPEG_QUALITY: Final = 85
"""JPEG quality: 96 x 96 pixels of noise, the worst case, take 8 KB."""


@contextlib.contextmanager
def replaced_folder(folder: Path) -> Iterator[Path]:
    """Yield a new folder, which replaces `folder` at the end. Raise `OSError` if the disk cannot be written."""
    new, old = folder.with_name(f".{folder.name}.tmp"), folder.with_name(f".{folder.name}.old")
    shutil.rmtree(new, ignore_errors=True)
    try:
        new.mkdir()
        yield new
        shutil.rmtree(old, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):  # a non-empty folder cannot be replaced by rename
            folder.rename(old)
        new.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    except OSError:
        shutil.rmtree(new, ignore_errors=True)
        raise


def to_visible(pixels: NDArray[Any]) -> NDArray[np.uint8]:
    """Return pixels [H, W, C] of any type as uint8 [H, W, 3], of the first three channels, or [H, W, 1] of the first.

    The range from the 2nd to the 98th percentile of these channels becomes 0 to 255.
    """
    shown = pixels[..., : 3 if pixels.shape[2] >= 3 else 1].astype(np.float64)
    low, high = np.percentile(shown, _PERCENTILES)
    scaled: NDArray[np.float64] = (shown - low) / (high - low or 1) * 255
    return scaled.round().clip(0, 255).astype(np.uint8)


def encode_thumbnail(picture: Image.Image, size: int = 96) -> tuple[bytes, str]:
    """Return file content and suffix: up to 64 pixels unchanged as PNG, others as JPEG of up to `size` pixels."""
    file = BytesIO()
    if max(picture.size) <= MAX_UNSCALED_SIDE:
        picture.save(file, "PNG")
        return file.getvalue(), "png"
    picture.thumbnail((size, size), Image.Resampling.LANCZOS)
    picture.save(file, "JPEG", quality=_JPEG_QUALITY)
    return file.getvalue(), "jpg"


def to_data_url(data: bytes, suffix: str) -> str:
    """Return the file content that `encode_thumbnail` returned as a data URL."""
    kind = "png" if suffix == "png" else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(data).decode('ascii')}"
