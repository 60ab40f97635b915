"""Which files are called like an image, and what the others are called. Opens no file."""

from collections import Counter
from collections.abc import Iterable
from typing import Final

from paceline.data.sources.places import printable

JPEG_EXTENSIONS: Final = frozenset({"jpg", "jpeg", "jpe", "jfif", "jfi"})
"""Browsers and Windows save JPEGs as the last three too."""
IMAGE_EXTENSIONS: Final = JPEG_EXTENSIONS | {"png", "bmp", "gif", "webp", "tif", "tiff", "ppm", "pgm"}
_NUM_KINDS: Final = 5


def is_image_name(name: str) -> bool:
    """Whether a file of this name counts as an image: a name, a dot and an extension that `decode` reads."""
    stem, dot, extension = name.rpartition(".")
    return bool(stem and dot) and extension.lower() in IMAGE_EXTENSIONS


def told_kinds(names: Iterable[str]) -> str:
    """Return what files are called, most frequent first: `12 .heic, 4 .txt, 1 Thumbs.db`; "" of no files.

    Files of one extension are counted together, and where all of them have one name that is told instead.
    """
    kinds: dict[str, Counter[str]] = {}
    for name in names:
        stem, dot, extension = name.rpartition(".")
        kinds.setdefault(f".{extension.lower()}" if stem and dot else "", Counter())[name] += 1
    told = sorted((-counted.total(), _called(kind, counted)) for kind, counted in kinds.items())
    rest = -sum(number for number, _ in told[_NUM_KINDS:])
    parts = [f"{-number:,} {called}" for number, called in told[:_NUM_KINDS]]
    return ", ".join([*parts, *([f"{rest:,} others"] if rest else [])])


def _called(kind: str, counted: Counter[str]) -> str:
    if len(counted) == 1:
        return printable(next(iter(counted)))
    return printable(kind) if kind else "without an extension"
