"""Find the image files of a folder that has one sub-folder for each class. Opens no file."""

import os
import unicodedata
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import DataError
from paceline.core.units import count
from paceline.data.sources.listed import fault_of, refuse_faults
from paceline.data.sources.places import printable

IMAGE_EXTENSIONS = frozenset({"jpg", "jpeg", "png", "bmp", "gif", "webp", "tif", "tiff", "ppm", "pgm"})
_Identity = tuple[int, int]


@dataclass(frozen=True, eq=False)
class ClassTree:
    """The images below `root`: class by class, by name within a class.

    `class_names` are the sub-folders' names in order, undecodable bytes as surrogates. `paths` are N paths relative
    to `root`, in file system encoding; `labels`, int32 [N], index `class_names`. `notes` say what was left out.
    """

    root: Path
    class_names: tuple[str, ...]
    paths: list[bytes]
    labels: NDArray[np.int32]
    notes: tuple[str, ...]


@dataclass
class _Findings:
    """What one walk met: image paths relative to the root, why some of them cannot be read, and other files."""

    images: list[bytes] = field(default_factory=list)
    faults: dict[str, str] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)


def scan_classes(root: Path, *, setting: str, skip_bad: bool = False) -> ClassTree:
    """Return the class folders of `root` and the images below them, at any depth; hidden files do not count.

    Raise `DataError`, naming `setting` or the path, where `root` or a class has no images, where two classes have one
    name, or where something that is called like an image cannot be read: a folder, a pipe, a dangling link, an empty
    file or one without permission. With `skip_bad` the latter count as images, for whoever reads them to skip.
    """
    identity, top = _list(root, setting)
    folders = sorted((entry.name for entry in top if _kind(entry) == "folder"), key=os.fsencode)
    loose = [entry.path for entry in top if _is_image(entry.name) and _kind(entry) != "folder"]
    found = _Findings()
    paths: list[bytes] = []
    sizes = []
    for name in folders:
        _walk(f"{root}/{name}", f"{name}/", found, (identity,))
        paths += sorted(found.images)
        sizes.append(len(found.images))
        found.images.clear()
    if not skip_bad:
        refuse_faults(printable(root), found.faults)
    _refuse_same(root, folders)
    _refuse_empty(root, folders, sizes, num_loose=len(loose), setting=setting)
    labels = np.repeat(np.arange(len(folders), dtype=np.int32), sizes)
    return ClassTree(root, tuple(folders), paths, labels, _notes(root, folders, loose, found.others))


def has_folders(root: Path) -> bool:
    """Whether `root` has sub-folders that are not hidden. Raise `DataError` where it cannot be listed."""
    return any(_kind(entry) == "folder" for entry in _list(root)[1])


def _is_image(name: str) -> bool:
    stem, dot, extension = name.rpartition(".")
    return bool(stem and dot) and extension.lower() in IMAGE_EXTENSIONS


def _kind(entry: os.DirEntry[str]) -> Literal["file", "folder", "neither"]:
    """Return what a name, or the link it is, stands for."""
    try:
        return "file" if entry.is_file() else "folder" if entry.is_dir() else "neither"
    except OSError:  # a link to itself
        return "neither"


def _list(folder: str | Path, setting: str = "") -> tuple[_Identity, list[os.DirEntry[str]]]:
    """Return which folder this is, and what is in it and not hidden."""
    place = f"{setting}: " if setting else ""
    fix = f"set {setting} to a folder of class folders" if setting else "make it readable or remove it"
    try:
        status = Path(folder).stat()
        with os.scandir(folder) as entries:
            return (status.st_dev, status.st_ino), [entry for entry in entries if not entry.name.startswith(".")]
    except FileNotFoundError as error:
        raise DataError(f"{place}{printable(folder)} does not exist; {fix}") from error
    except NotADirectoryError as error:
        raise DataError(f"{place}{printable(folder)} is not a folder; {fix}") from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(f"{place}{printable(folder)} cannot be listed: {reason}; {fix}") from error


def _walk(folder: str, relative: str, found: _Findings, above: tuple[_Identity, ...]) -> None:
    identity, entries = _list(folder)
    if identity in above:  # links are followed, as data sets are often made of them
        raise DataError(f"{printable(folder)}: links back to a folder above it; remove the link")
    for entry in entries:
        name = entry.name
        match _is_image(name), _kind(entry):
            case True, _:
                found.images.append(os.fsencode(relative + name))
                fault = fault_of(entry)
                if fault:
                    found.faults[relative + name] = fault
            case False, "folder":
                _walk(f"{folder}/{name}", f"{relative}{name}/", found, (*above, identity))
            case _:
                found.others.append(entry.path)


def _refuse_same(root: Path, folders: list[str]) -> None:
    """Refuse classes that look the same: written with other bytes, as macOS and Linux write an accent."""
    seen: dict[str, str] = {}
    for name in folders:
        other = seen.setdefault(unicodedata.normalize("NFC", printable(name)), name)
        if other != name:
            raise DataError(
                f"{printable(f'{root}/{name}')}: is a class whose name differs from that of another only by how it is "
                f"encoded ({other!a} and {name!a}); put the images of both in one folder"
            )


def _refuse_empty(root: Path, folders: list[str], sizes: list[int], *, num_loose: int, setting: str) -> None:
    if any(sizes):
        if 0 in sizes:
            empty = printable(f"{root}/{folders[sizes.index(0)]}")
            raise DataError(f"{empty}: is a class folder without images; remove it or put images in it")
        return
    if num_loose:
        state = f"{count(num_loose, 'image')} in it, in no class folder; make one folder for each class"
    elif folders:
        state = f"{count(len(folders), 'folder')} in it, all without images; expected ROOT/CLASS/*.jpg"
    else:
        state = "no class folders in it; expected ROOT/CLASS/*.jpg"
    raise DataError(f"{setting}: {printable(root)} has no images to train on: {state}")


def _notes(root: Path, folders: list[str], loose: list[str], others: list[str]) -> tuple[str, ...]:
    notes = []
    if len(folders) == 1:
        notes.append(f"{printable(root)} has one class only ({printable(folders[0])}); is it one level too high?")
    for paths, why in ((loose, "lying in no class folder"), (others, "not named like an image (.jpg, .png, ...)")):
        if paths:
            first = printable(min(paths, key=os.fsencode))
            notes.append(f"left out {count(len(paths), 'file')} {why}, such as {first}")
    return tuple(notes)
