"""What a listing says about a file: whether it can be an image that can be read. Opens no file."""

import os
import stat
from collections.abc import Iterator, Mapping

from paceline.core.errors import DataError
from paceline.core.units import count
from paceline.data.sources.places import printable

_NUM_NAMED = 5


def fault_of(entry: os.DirEntry[str]) -> str:
    """Return why the file that `entry` stands for cannot be read, or "" as far as can be seen without opening it."""
    try:
        status = entry.stat()
    except OSError as error:
        return "a dangling link" if entry.is_symlink() else str(error.strerror)
    if not stat.S_ISREG(status.st_mode):
        return "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe or a device"
    if status.st_size == 0:
        return "empty"
    # Asked only where it is not plain: over a network every question is a message.
    if not status.st_mode & stat.S_IROTH and not os.access(entry.path, os.R_OK):
        return "no permission to read it"
    return ""


def faults_of(paths: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Give (name, fault) of the files that cannot be read; `paths` are absolute ones by their names.

    Their folders are listed, each once, which is far less than to look at each file over a network.
    """
    folders: dict[str, dict[str, str]] = {}
    for name, path in paths.items():
        folder, _, last = path.rpartition("/")
        folders.setdefault(folder or "/", {})[last] = name
    for folder, names in folders.items():
        yield from _faults_in(folder, names)


def _faults_in(folder: str, names: dict[str, str]) -> Iterator[tuple[str, str]]:
    missing = dict(names)
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                name = missing.pop(entry.name, None)
                fault = fault_of(entry) if name is not None else ""
                if name is not None and fault:
                    yield name, fault
    except OSError as error:
        yield from ((name, str(error.strerror)) for name in missing.values())
        return
    yield from ((name, "no such file") for name in missing.values())


def refuse_faults(place: str, faults: Mapping[str, str]) -> None:
    """Raise `DataError` when there are any `faults`, by name: how many, and the first few."""
    if not faults:
        return
    first = sorted(faults, key=os.fsencode)[:_NUM_NAMED]
    named = ", ".join(f"{printable(name)} ({faults[name]})" for name in first)
    more = ", ..." if len(faults) > len(first) else ""
    raise DataError(
        f"{place}: {count(len(faults), 'image')} cannot be read: {named}{more}; remove or replace them, or set "
        f"data.on_bad_image=skip"
    )
