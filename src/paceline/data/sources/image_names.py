"""Recognize image files by their names, without opening them."""

from collections import Counter
from collections.abc import Iterable
from typing import Final

from paceline.data.sources.places import printable

# Browsers and Windows also use the last three.
JPEG_EXTENSIONS: Final = frozenset({"jpg", "jpeg", "jpe", "jfif", "jfi"})
IMAGE_EXTENSIONS: Final = JPEG_EXTENSIONS | {"png", "bmp", "gif", "webp", "tif", "tiff", "ppm", "pgm"}
_MAX_KINDS_SHOWN: Final = 5


def has_image_extension(name: str) -> bool:
    """Return whether `name` has a stem and an extension that `decode` reads."""
    stem, dot, extension = name.rpartition(".")
    return bool(stem and dot) and extension.lower() in IMAGE_EXTENSIONS


def summarize_extensions(names: Iterable[str]) -> str:
    """Count file names by extension, most frequent first: `12 .heic, 4 .txt, 1 Thumbs.db`.

    If all files of an extension have one name, the name is shown instead.
    """
    kinds: dict[str, Counter[str]] = {}
    for name in names:
        stem, dot, extension = name.rpartition(".")
        kinds.setdefault(f".{extension.lower()}" if stem and dot else "", Counter())[name] += 1
    counts = sorted(
        (-names_of_kind.total(), _format_kind(kind, names_of_kind)) for kind, names_of_kind in kinds.items()
    )
    rest = -sum(number for number, _ in counts[_MAX_KINDS_SHOWN:])
    parts = [f"{-number:,} {called}" for number, called in counts[:_MAX_KINDS_SHOWN]]
    return ", ".join([*parts, *([f"{rest:,} others"] if rest else [])])


def _format_kind(kind: str, names: Counter[str]) -> str:
    if len(names) == 1:
        return printable(next(iter(names)))
    return printable(kind) if kind else "without an extension"
