"""Handle paths as users type them, without raising."""

import os
from pathlib import Path


def expand_path(text: str) -> Path:
    """Expand `~` in a path if there is a home folder."""
    return Path(os.path.expanduser(text))  # noqa: PTH111 - the method raises without a home folder


def is_folder(path: Path) -> bool:
    """Return whether `path` is a folder, False if that cannot be determined."""
    return os.path.isdir(path)  # noqa: PTH112 - the method raises if a parent folder is not searchable


def is_file(path: Path) -> bool:
    """Return whether `path` is a regular file, False if that cannot be determined."""
    return os.path.isfile(path)  # noqa: PTH113 - as above


def printable(name: str | Path) -> str:
    r"""Escape characters that cannot be printed on one line or encoded: `a\n`, `\udcff`."""
    text = str(name)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def printable_lines(text: str) -> str:
    """Escape characters that cannot be printed or encoded, except line ends."""
    return "\n".join(map(printable, text.split("\n")))
