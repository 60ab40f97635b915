"""Keep the worst misclassified images of a run as thumbnails, with `worst.json`, which says what they are."""

import contextlib
import json
import shutil
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, Final

import numpy as np
from PIL import Image

from paceline.core.class_table import printable
from paceline.core.dataset import Source
from paceline.core.errors import DataError
from paceline.core.files import write_new
from paceline.core.mistake import Mistake
from paceline.data.decode import decode

LISTED: Final = "worst.json"
SMALL: Final = 64
"""Pixels of the longer side up to which an image is kept as it is: larger ones are photographs, and shrunk."""
_QUALITY: Final = 85
"""Of JPEG: noise of 96 pixels squared, the worst there is, takes 8 KB at it."""


def save_worst(folder: Path, mistakes: Sequence[Mistake], source: Source, size: int = 96) -> None:
    """Write a thumbnail of each of the `mistakes` that can still be read, and `worst.json`, into a new `folder`.

    Images of up to 64 pixels are PNG files as they are, others JPEG files of up to `size` pixels, upright; none has
    16 KB. `worst.json` is a list of {index, name, true, predicted, confidence, loss, file}, in the order of
    `mistakes`. A folder of before is replaced when the new one is whole; without mistakes there is none. Raise
    `OSError` where the disk refuses.
    """
    if not mistakes:
        return shutil.rmtree(folder, ignore_errors=True)
    beside, old = folder.with_name(f".{folder.name}.tmp"), folder.with_name(f".{folder.name}.old")
    shutil.rmtree(beside, ignore_errors=True)
    try:
        beside.mkdir()
        rows = [row for mistake in mistakes if (row := _saved(beside, mistake, source, size))]
        write_new(beside / LISTED, json.dumps(rows, indent=2) + "\n")
        shutil.rmtree(old, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):  # a folder that is not empty cannot be replaced at once
            folder.rename(old)
        beside.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    except OSError:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    return None


def _saved(folder: Path, mistake: Mistake, source: Source, size: int) -> dict[str, Any] | None:
    """Write the thumbnail and return its row; None for an image that cannot be read any more."""
    try:
        picture = _picture(source, mistake.index)
    except DataError:
        return None
    names = source.info.class_names
    data, suffix = _thumbnail(picture, size)
    file = f"{mistake.index}.{suffix}"
    write_new(folder / file, data)
    return {
        "index": mistake.index,
        "name": printable(source.name_of(mistake.index)),
        "true": printable(names[mistake.label]),
        "predicted": printable(names[mistake.predicted]),
        "confidence": mistake.confidence,
        "loss": mistake.loss,
        "file": file,
    }


def _picture(source: Source, index: int) -> Image.Image:
    """Return the image, upright, in mode L or RGB. Raise `DataError` where it cannot be read."""
    content, _ = source.read(index)
    is_grey = source.info.channels == 1
    if isinstance(content, bytes):
        content = np.asarray(decode(content, channels=1 if is_grey else 3, name=source.name_of(index)))
    # From pixels alone: a comment or a colour profile of the file's would go along, and be any number of bytes.
    return Image.fromarray(content[..., 0] if content.ndim == 3 and is_grey else content)


def _thumbnail(picture: Image.Image, size: int) -> tuple[bytes, str]:
    """Return the bytes of a file, and the end of its name."""
    file = BytesIO()
    if max(picture.size) <= SMALL:
        picture.save(file, "PNG")
        return file.getvalue(), "png"
    picture.thumbnail((size, size), Image.Resampling.LANCZOS)
    picture.save(file, "JPEG", quality=_QUALITY)
    return file.getvalue(), "jpg"
