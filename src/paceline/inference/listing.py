"""The images a user means: files, what is below folders, and paths that come in lines. Opens none of them."""

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
    """An image or a folder that cannot be read: its path, or the URL that was named, and why in a few words."""

    path: Path | str
    reason: str


def listed(words: Iterable[str], lines: Iterable[bytes]) -> Iterator[Path | Unread]:
    """Give the images that `words` name, in their order; the word `-` stands for the paths in `lines`, one a line.

    Of a folder it is those at any depth that are called like an image (.jpg, .png, ...), sorted by name, folder by
    folder; hidden ones do not count, and links are followed. A file that is named itself may be called anything.
    """
    for word in words:
        if word == FROM_LINES:
            names = (os.fsdecode(line.rstrip(b"\r\n")) for line in lines)
            for name in filter(None, names):
                yield from _named(name)
        else:
            yield from _named(word)


def _named(name: str) -> Iterator[Path | Unread]:
    path = expanded(name)
    if is_url(name) and not os.path.lexists(path):
        yield Unread(public_url(name), "URLs are not fetched; download it, and name the file")
        return
    if not is_folder(path):
        yield path
        return
    found = _below(path, ())
    first = next(found, None)
    if first is None:
        yield Unread(path, "has no image files in it (.jpg, .png, ...); name a folder that has")
        return
    yield first
    yield from found


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
    """Return which folder this is, and what is in it and not hidden, by name."""
    status = folder.stat()
    identity = (status.st_dev, status.st_ino)
    if identity in above:
        raise DataError("it is a link back to a folder above it")
    with os.scandir(folder) as found:
        entries = [entry for entry in found if not entry.name.startswith(".")]
    return identity, sorted(entries, key=lambda entry: os.fsencode(entry.name))
