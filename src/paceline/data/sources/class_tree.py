"""Find the image files of a folder with one subfolder per class, without opening a file."""

import os
import unicodedata
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import DataError
from paceline.core.units import count
from paceline.data.sources.image_names import has_image_extension, summarize_extensions
from paceline.data.sources.listed import find_fault, raise_for_faults
from paceline.data.sources.places import printable

# Purpose of the images below a folder, for error messages.
ImagePurpose = Literal["training", "validation", "evaluation"]
_PURPOSE_TEXT: Final[dict[ImagePurpose, str]] = {
    "training": "to train on",
    "validation": "to validate on",
    "evaluation": "to evaluate on",
}
_CONVERT_HINT: Final = "convert images to .jpg or .png"
_FolderId = tuple[int, int]


@dataclass(frozen=True, eq=False)
class ClassTree:
    """The images below `root`, ordered by class and then by name.

    `paths` are N paths relative to `root` in file system encoding; `labels`, int32 [N], index `class_names`.
    """

    root: Path
    class_names: tuple[str, ...]  # undecodable bytes as surrogates
    paths: list[bytes]
    labels: NDArray[np.int32]
    notes: tuple[str, ...]  # about files that were left out


@dataclass
class _WalkResult:
    """Result of a directory walk.

    `faults` maps relative image paths to the reason why they cannot be read; `others` are absolute paths of other
    files.
    """

    images: list[bytes] = field(default_factory=list)
    faults: dict[str, str] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)


def scan_class_folders(
    root: Path, *, setting: str, purpose: ImagePurpose = "training", skip_bad: bool = False
) -> ClassTree:
    """List the class folders of `root` and the images below them at any depth, without hidden files.

    Raise `DataError`, naming `setting` or the path, if `root` or a class has no images, if two class names look the
    same, or if an entry named like an image cannot be read: a folder, a pipe, a dangling link, an empty file or one
    without permission. With `skip_bad` such entries count as images.
    """
    identity, top = _list_entries(root, setting)
    folders = sorted((entry.name for entry in top if _entry_kind(entry) == "folder"), key=os.fsencode)
    loose = [entry.path for entry in top if has_image_extension(entry.name) and _entry_kind(entry) != "folder"]
    walked = _WalkResult()
    paths: list[bytes] = []
    sizes = []
    empty: dict[str, list[str]] = {}
    for name in folders:
        num_others = len(walked.others)
        _walk_folder(f"{root}/{name}", f"{name}/", walked, (identity,))
        paths += sorted(walked.images)
        sizes.append(len(walked.images))
        if not walked.images:
            empty[name] = walked.others[num_others:]
        walked.images.clear()
    if not skip_bad:
        raise_for_faults(printable(root), walked.faults)
    _check_distinct_names(root, folders)
    if not any(sizes):
        raise DataError(
            f"{setting}: {printable(root)} has no images {_PURPOSE_TEXT[purpose]}: {_describe_missing_images(empty, loose, purpose)}"
        )
    _check_no_empty_class(root, empty)
    labels = np.repeat(np.arange(len(folders), dtype=np.int32), sizes)
    return ClassTree(root, tuple(folders), paths, labels, _build_notes(root, folders, loose, walked.others))


def has_subfolders(root: Path) -> bool:
    """Return whether `root` has subfolders that are not hidden. Raise `DataError` if it cannot be listed."""
    return any(_entry_kind(entry) == "folder" for entry in _list_entries(root)[1])


def _entry_kind(entry: os.DirEntry[str]) -> Literal["file", "folder", "neither"]:
    try:
        return "file" if entry.is_file() else "folder" if entry.is_dir() else "neither"
    except OSError:  # a link that refers to itself
        return "neither"


def _list_entries(folder: str | Path, setting: str = "") -> tuple[_FolderId, list[os.DirEntry[str]]]:
    prefix = f"{setting}: " if setting else ""
    fix = f"set {setting} to a folder of class folders" if setting else "make it readable or remove it"
    try:
        status = Path(folder).stat()
        with os.scandir(folder) as entries:
            return (status.st_dev, status.st_ino), [entry for entry in entries if not entry.name.startswith(".")]
    except FileNotFoundError as error:
        raise DataError(f"{prefix}{printable(folder)} does not exist; {fix}") from error
    except NotADirectoryError as error:
        raise DataError(f"{prefix}{printable(folder)} is not a folder; {fix}") from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(f"{prefix}{printable(folder)} cannot be listed: {reason}; {fix}") from error


def _walk_folder(folder: str, relative: str, result: _WalkResult, above: tuple[_FolderId, ...]) -> None:
    identity, entries = _list_entries(folder)
    if identity in above:  # links are followed, as many data sets consist of them
        raise DataError(f"{printable(folder)}: links to one of its parent folders; remove the link")
    for entry in entries:
        name = entry.name
        match has_image_extension(name), _entry_kind(entry):
            case True, _:
                result.images.append(os.fsencode(relative + name))
                fault = find_fault(entry)
                if fault:
                    result.faults[relative + name] = fault
            case False, "folder":
                _walk_folder(f"{folder}/{name}", f"{relative}{name}/", result, (*above, identity))
            case _:
                result.others.append(entry.path)


def _check_distinct_names(root: Path, folders: list[str]) -> None:
    # macOS and Linux encode an accented letter differently (NFD and NFC).
    seen: dict[str, str] = {}
    for name in folders:
        other = seen.setdefault(unicodedata.normalize("NFC", printable(name)), name)
        if other != name:
            raise DataError(
                f"{printable(f'{root}/{name}')}: differs from another class name only in its Unicode encoding "
                f"({other!a} and {name!a}); move the images of both into one folder"
            )


def _describe_missing_images(empty: dict[str, list[str]], loose: list[str], use: ImagePurpose) -> str:
    if loose:
        state = f"{count(len(loose), 'image')} in it, in no class folder; make one folder for each class"
        return f"{state}, or use `paceline predict`, which needs none" if use == "evaluation" else state
    if not empty:
        return "no class folders in it; expected ROOT/CLASS/*.jpg"
    kinds = _summarize_kinds([path for others in empty.values() for path in others])
    state = f"{count(len(empty), 'folder')} in it, all without images"
    return f"{state}, with {kinds}; {_CONVERT_HINT}" if kinds else f"{state}; expected ROOT/CLASS/*.jpg"


def _check_no_empty_class(root: Path, empty: dict[str, list[str]]) -> None:
    for name, others in empty.items():
        folder, kinds = printable(f"{root}/{name}"), _summarize_kinds(others)
        if not kinds:
            raise DataError(f"{folder}: is a class folder without images; remove it or put images in it")
        raise DataError(f"{folder}: is a class folder without images, with {kinds}; remove it, or {_CONVERT_HINT}")


def _summarize_kinds(paths: list[str]) -> str:
    return summarize_extensions(path.rpartition("/")[2] for path in paths)


def _build_notes(root: Path, folders: list[str], loose: list[str], others: list[str]) -> tuple[str, ...]:
    notes = []
    if len(folders) == 1:
        notes.append(f"{printable(root)} has one class only ({printable(folders[0])}); is it one level too high?")
    for paths, why in (
        (loose, "lying in no class folder"),
        (others, f"not named like an image ({_summarize_kinds(others)})"),
    ):
        if paths:
            first = printable(min(paths, key=os.fsencode))
            notes.append(f"left out {count(len(paths), 'file')} {why}, such as {first}")
    return tuple(notes)
