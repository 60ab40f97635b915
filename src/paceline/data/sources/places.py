"""Paths as users give them: expanded, looked at and printed without ever raising."""

import os
from pathlib import Path


def expanded(text: str) -> Path:
    """Return the path that `text` means, `~` replaced by the home folder where there is one."""
    return Path(os.path.expanduser(text))  # noqa: PTH111 - the method raises where there is no home


def is_folder(path: Path) -> bool:
    """Whether `path` can be seen to be a folder."""
    return os.path.isdir(path)  # noqa: PTH112 - the method raises where a folder above may not be searched


def is_file(path: Path) -> bool:
    """Whether `path` can be seen to be a regular file."""
    return os.path.isfile(path)  # noqa: PTH113 - as above


def printable(name: str | Path) -> str:
    r"""Return `name` with what cannot be printed on one line, or not encoded, as an escape: `a\n`, `\udcff`."""
    text = str(name)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def printable_lines(text: str) -> str:
    """Return `text` with everything that is not printable as an escape, except line ends."""
    return "\n".join(map(printable, text.split("\n")))
