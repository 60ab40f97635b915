"""List the images that a user names: files, folders, and paths on standard input. This module opens no image."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.core.errors import DataError
from paceline.core.urls import is_url, public_url
from paceline.data.sources.image_names import is_image_name
from paceline.data.sources.listed import fault_of
from paceline.data.sources.places import expanded, is_folder

FROM_LINES = "-"
_Identity = tuple[int, int]


@dataclass(frozen=True)
class Unread:
    """An image or folder that cannot be read: its path or URL, and a short reason."""

    path: Path | str
    reason: str


def listed(names: Iterable[str], lines: Iterable[bytes]) -> Iterator[Path | Unread]:
    """Yield the images that `names` name, in order; `-` stands for the paths in `lines`, one per line.

    Of a folder, yield the files at any depth named like an image (.jpg, .png, ...), sorted by name, folder by folder,
    without hidden files. A file named directly may have any name.
    """
    for name in names:
        if name == FROM_LINES:
            paths = (os.fsdecode(line.rstrip(b"\r\n")) for line in lines)
            for path in filter(None, paths):
                yield from _named(path)
        else:
            yield from _named(name)


def _named(name: str) -> Iterator[Path | Unread]:
    path = expanded(name)
    if is_url(name) and not os.path.lexists(path):
        yield Unread(public_url(name), "URLs are not supported; download it, and name the file")
        return
    if not is_folder(path):
        yield path
        return
    images = _below(path, ())
    first = next(images, None)
    if first is None:
        yield Unread(path, "has no image files (.jpg, .png, ...); name another folder")
        return
    yield first
    yield from images


def _below(folder: Path, above: tuple[_Identity, ...]) -> Iterator[Path | Unread]:
    try:
        identity, entries = _entries(folder, above)
    except (DataError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        yield Unread(folder, f"cannot be listed: {reason}; make it readable or leave it out")
        return
    for entry in entries:
        if is_image_name(entry.name):
            fault = fault_of(entry)
            yield (
                Unread(Path(entry.path), f"cannot be read: {fault}; remove it or replace it")
                if fault
                else Path(entry.path)
            )
        elif is_folder(Path(entry.path)):
            yield from _below(Path(entry.path), (*above, identity))


def _entries(folder: Path, above: tuple[_Identity, ...]) -> tuple[_Identity, list[os.DirEntry[str]]]:
    status = folder.stat()
    identity = (status.st_dev, status.st_ino)
    if identity in above:
        raise DataError("it links back to a parent folder")
    with os.scandir(folder) as scan:
        entries = [entry for entry in scan if not entry.name.startswith(".")]
    return identity, sorted(entries, key=lambda entry: os.fsencode(entry.name))
