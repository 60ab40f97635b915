"""Folders of thumbnails in a run directory, which are replaced as a whole."""

import contextlib
import shutil
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Final

from PIL import Image

MAX_UNSCALED_SIDE: Final = 64
"""Longest side, in pixels, of an image that is saved unchanged. Larger images are downscaled."""
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


def encode_thumbnail(picture: Image.Image, size: int = 96) -> tuple[bytes, str]:
    """Return file content and suffix: up to 64 pixels unchanged as PNG, others as JPEG of up to `size` pixels."""
    file = BytesIO()
    if max(picture.size) <= MAX_UNSCALED_SIDE:
        picture.save(file, "PNG")
        return file.getvalue(), "png"
    picture.thumbnail((size, size), Image.Resampling.LANCZOS)
    picture.save(file, "JPEG", quality=_JPEG_QUALITY)
    return file.getvalue(), "jpg"
