"""Find image files that cannot be read from directory listings, without opening a file."""

import os
import stat
from collections.abc import Iterator, Mapping

from paceline.core.errors import DataError
from paceline.core.units import count
from paceline.data.sources.places import printable

_MAX_FAULTS_SHOWN = 5


def find_fault(entry: os.DirEntry[str]) -> str:
    """Return the reason why a file cannot be read, or "" if the listing shows none."""
    try:
        status = entry.stat()
    except OSError as error:
        return "a dangling link" if entry.is_symlink() else str(error.strerror)
    if not stat.S_ISREG(status.st_mode):
        return "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe or a device"
    if status.st_size == 0:
        return "empty"
    # `os.access` is a round trip on a network file system, so call it only if the mode bits leave it open.
    if not status.st_mode & stat.S_IROTH and not os.access(entry.path, os.R_OK):
        return "no permission to read it"
    return ""


def find_faults(paths: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield (name, reason) of the files that cannot be read; `paths` maps names to absolute paths."""
    # Listing each folder once takes far fewer requests over a network than one `stat` per file.
    folders: dict[str, dict[str, str]] = {}
    for name, path in paths.items():
        folder, _, last = path.rpartition("/")
        folders.setdefault(folder or "/", {})[last] = name
    for folder, names in folders.items():
        yield from _find_faults_in_folder(folder, names)


def _find_faults_in_folder(folder: str, names: dict[str, str]) -> Iterator[tuple[str, str]]:
    missing = dict(names)
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                name = missing.pop(entry.name, None)
                fault = find_fault(entry) if name is not None else ""
                if name is not None and fault:
                    yield name, fault
    except OSError as error:
        yield from ((name, str(error.strerror)) for name in missing.values())
        return
    yield from ((name, "no such file") for name in missing.values())


def raise_for_faults(root: str, faults: Mapping[str, str]) -> None:
    """Raise `DataError` with the number of `faults` and the first few, unless there are none."""
    if not faults:
        return
    first = sorted(faults, key=os.fsencode)[:_MAX_FAULTS_SHOWN]
    named = ", ".join(f"{printable(name)} ({faults[name]})" for name in first)
    more = ", ..." if len(faults) > len(first) else ""
    raise DataError(
        f"{root}: {count(len(faults), 'image')} cannot be read: {named}{more}; remove or replace them, or set "
        f"data.on_bad_image=skip"
    )
