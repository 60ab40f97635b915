"""Find the image files of a folder that has one sub-folder for each class. Opens no file."""

import os
import unicodedata
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import DataError
from paceline.core.units import count
from paceline.data.sources.image_names import is_image_name, told_kinds
from paceline.data.sources.listed import fault_of, refuse_faults
from paceline.data.sources.places import printable

Use = Literal["training", "validation", "evaluation"]
"""What the images of a tree are for."""
_WHAT_FOR: Final[dict[Use, str]] = {
    "training": "to train on",
    "validation": "to validate by",
    "evaluation": "to evaluate by",
}
_SAVE_AS: Final = "save what are photographs as .jpg or .png"
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


def scan_classes(root: Path, *, setting: str, use: Use = "training", skip_bad: bool = False) -> ClassTree:
    """Return the class folders of `root` and the images below them, at any depth; hidden files do not count.

    Raise `DataError`, naming `setting` or the path, where `root` has no images for `use` or a class has none, where
    two classes have one name, or where something that is called like an image cannot be read: a folder, a pipe, a
    dangling link, an empty file or one without permission. With `skip_bad` the latter count as images, for whoever
    reads them to skip.
    """
    identity, top = _list(root, setting)
    folders = sorted((entry.name for entry in top if _kind(entry) == "folder"), key=os.fsencode)
    loose = [entry.path for entry in top if is_image_name(entry.name) and _kind(entry) != "folder"]
    found = _Findings()
    paths: list[bytes] = []
    sizes = []
    empty: dict[str, list[str]] = {}
    for name in folders:
        num_others = len(found.others)
        _walk(f"{root}/{name}", f"{name}/", found, (identity,))
        paths += sorted(found.images)
        sizes.append(len(found.images))
        if not found.images:
            empty[name] = found.others[num_others:]
        found.images.clear()
    if not skip_bad:
        refuse_faults(printable(root), found.faults)
    _refuse_same(root, folders)
    if not any(sizes):
        raise DataError(f"{setting}: {printable(root)} has no images {_WHAT_FOR[use]}: {_state(empty, loose, use)}")
    _refuse_empty(root, empty)
    labels = np.repeat(np.arange(len(folders), dtype=np.int32), sizes)
    return ClassTree(root, tuple(folders), paths, labels, _notes(root, folders, loose, found.others))


def has_folders(root: Path) -> bool:
    """Whether `root` has sub-folders that are not hidden. Raise `DataError` where it cannot be listed."""
    return any(_kind(entry) == "folder" for entry in _list(root)[1])


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
        match is_image_name(name), _kind(entry):
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


def _state(empty: dict[str, list[str]], loose: list[str], use: Use) -> str:
    """Return what lies in a folder that has no image in any class, and what to do."""
    if loose:
        state = f"{count(len(loose), 'image')} in it, in no class folder; make one folder for each class"
        return f"{state}, or take `paceline predict`, which needs none" if use == "evaluation" else state
    if not empty:
        return "no class folders in it; expected ROOT/CLASS/*.jpg"
    kinds = _kinds([path for others in empty.values() for path in others])
    state = f"{count(len(empty), 'folder')} in it, all without images"
    return f"{state}, with {kinds}; {_SAVE_AS}" if kinds else f"{state}; expected ROOT/CLASS/*.jpg"


def _refuse_empty(root: Path, empty: dict[str, list[str]]) -> None:
    """Refuse the first of the classes without images, which are given with the files that they have."""
    for name, others in empty.items():
        place, kinds = printable(f"{root}/{name}"), _kinds(others)
        if not kinds:
            raise DataError(f"{place}: is a class folder without images; remove it or put images in it")
        raise DataError(f"{place}: is a class folder without images, with {kinds}; remove it, or {_SAVE_AS}")


def _kinds(paths: list[str]) -> str:
    return told_kinds(path.rpartition("/")[2] for path in paths)


def _notes(root: Path, folders: list[str], loose: list[str], others: list[str]) -> tuple[str, ...]:
    notes = []
    if len(folders) == 1:
        notes.append(f"{printable(root)} has one class only ({printable(folders[0])}); is it one level too high?")
    for paths, why in ((loose, "lying in no class folder"), (others, f"not named like an image ({_kinds(others)})")):
        if paths:
            first = printable(min(paths, key=os.fsencode))
            notes.append(f"left out {count(len(paths), 'file')} {why}, such as {first}")
    return tuple(notes)
