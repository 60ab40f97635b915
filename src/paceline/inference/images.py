"""List the images that a user names: files, folders and paths on standard input."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.core.errors import DataError
from paceline.core.urls import is_url, public_url
from paceline.data.files import expand_path, has_image_extension, is_folder
from paceline.data.sources.image_files import find_fault

STDIN_NAME = "-"
_FolderId = tuple[int, int]


@dataclass(frozen=True)
class UnreadableImage:
    """An image or folder that cannot be read: its path or URL, and a short reason."""

    path: Path | str
    reason: str


def list_images(
    names: Iterable[str], lines: Iterable[bytes], *, arrays: bool = False
) -> Iterator[Path | UnreadableImage]:
    """Yield the images that `names` name, in order; `-` stands for the paths in `lines`, one per line.

    Of a folder, yield the files at any depth named like an image (.jpg, .png, ...), sorted by name, without hidden
    files; with `arrays`, .npy files too. A file named directly may have any name.
    """
    for name in names:
        if name == STDIN_NAME:
            paths = (os.fsdecode(line.rstrip(b"\r\n")) for line in lines)
            for path in filter(None, paths):
                yield from _expand_name(path, arrays)
        else:
            yield from _expand_name(name, arrays)


def _expand_name(name: str, arrays: bool) -> Iterator[Path | UnreadableImage]:
    path = expand_path(name)
    if is_url(name) and not os.path.lexists(path):
        yield UnreadableImage(public_url(name), "URLs are not supported; download it, and name the file")
        return
    if not is_folder(path):
        yield path
        return
    images = _walk_folder(path, arrays, ())
    first = next(images, None)
    if first is None:
        yield UnreadableImage(path, "has no image files (.jpg, .png, ...); name another folder")
        return
    yield first
    yield from images


def _walk_folder(folder: Path, arrays: bool, above: tuple[_FolderId, ...]) -> Iterator[Path | UnreadableImage]:
    try:
        identity, entries = _list_folder(folder, above)
    except (DataError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        yield UnreadableImage(folder, f"cannot be listed: {reason}; make it readable or leave it out")
        return
    for entry in entries:
        if has_image_extension(entry.name, arrays=arrays):
            fault = find_fault(entry)
            yield (
                UnreadableImage(Path(entry.path), f"cannot be read: {fault}; remove it or replace it")
                if fault
                else Path(entry.path)
            )
        elif is_folder(Path(entry.path)):
            yield from _walk_folder(Path(entry.path), arrays, (*above, identity))


def _list_folder(folder: Path, above: tuple[_FolderId, ...]) -> tuple[_FolderId, list[os.DirEntry[str]]]:
    status = folder.stat()
    identity = (status.st_dev, status.st_ino)
    # A link to a parent folder would be followed for ever.
    if identity in above:
        raise DataError("it links back to a parent folder")
    with os.scandir(folder) as scan:
        entries = [entry for entry in scan if not entry.name.startswith(".")]
    return identity, sorted(entries, key=lambda entry: os.fsencode(entry.name))
