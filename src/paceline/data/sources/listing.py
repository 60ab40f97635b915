"""List folders of images, and keep the listings of unchanged folders in `~/.cache/paceline/listings`.

A listing is taken from there if the folder has the same device, inode, modification time and change time as before, so
that an unchanged tree costs one `stat` per folder instead of one per file. Listings older than a day are not taken: a
file may have been emptied or made unreadable in place, which does not change its folder. Until then such a file is an
error when it is read. Torch-free.
"""

import contextlib
import hashlib
import json
import os
import re
import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Final, Literal

from paceline.core.errors import DataError
from paceline.core.files import make_folder, open_to_read, replace_file
from paceline.data.files import expand_path, printable
from paceline.data.sources.image_files import find_fault

FolderId = tuple[int, int]  # device and inode
Stamp = tuple[int, int, int, int]  # device, inode, modification and change time in ns
CACHE: Final = "~/.cache/paceline/listings"
MIN_IMAGES: Final = 1000
"""Smaller trees are not kept: they are listed as quickly."""
_MAX_BYTES: Final = 1 << 28
_MAX_FILES: Final = 8
_MAX_AGE_S: Final = 86400.0
# A folder that changed within the last seconds may change again without another time: file systems count time in
# steps of up to 2 s, and the clock of a server may be off. Git does not trust such entries either ("racily clean").
_MIN_QUIET_S: Final = 10.0
# Others, such as FUSE over object stores, may not change a folder's time with its entries.
_LOCAL: Final = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "tmpfs", "overlay"})
_NETWORK: Final = frozenset({"nfs", "nfs4", "lustre", "gpfs", "ceph", "beegfs"})
# Listing waits for the server of a network file system. On a local one, more threads wait for each other (measured).
_LOCAL_THREADS: Final = 2
_NETWORK_THREADS: Final = 8
_MOUNTS: Final = Path("/proc/self/mountinfo")
_VERSION: Final = 1
_SEPARATOR: Final = b"\0"
# Of a kept listing; no other file is ever removed.
_FILE_NAME: Final = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True)
class FolderListing:
    """The visible entries of a folder by name, in file system encoding. `faults` are reasons by image name."""

    images: list[bytes]
    others: list[bytes]
    folders: list[bytes]
    faults: dict[bytes, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Kept:
    """A listing as it is kept: the names of images, others and folders, each list joined by null bytes."""

    stamp: Stamp
    listed_s: float
    names: tuple[bytes, ...]

    @classmethod
    def from_listing(cls, listing: FolderListing, stamp: Stamp, listed_s: float) -> "_Kept":
        lists = (listing.images, listing.others, listing.folders)
        return cls(stamp, listed_s, tuple(_SEPARATOR.join(each) for each in lists))

    @property
    def listing(self) -> FolderListing:
        images, others, folders = (names.split(_SEPARATOR) if names else [] for names in self.names)
        return FolderListing(images, others, folders)


def entry_kind(entry: os.DirEntry[str]) -> Literal["file", "folder", "neither"]:
    """Return the kind of an entry; links are followed."""
    try:
        return "file" if entry.is_file() else "folder" if entry.is_dir() else "neither"
    except OSError:  # a link that refers to itself
        return "neither"


def list_entries(
    folder: str | Path, setting: str = "", parents: tuple[FolderId, ...] = ()
) -> tuple[FolderId, list[os.DirEntry[str]]]:
    """Return (device and inode, visible entries) of a folder.

    Raise `DataError`, naming `setting` or the folder, if it cannot be listed or is one of `parents`.
    """
    prefix = f"{setting}: " if setting else ""
    fix = f"set {setting} to a folder of class folders" if setting else "make it readable or remove it"
    try:
        status = Path(folder).stat()
        with os.scandir(folder) as entries:
            visible = [entry for entry in entries if not entry.name.startswith(".")]
    except FileNotFoundError as error:
        raise DataError(f"{prefix}{printable(folder)} does not exist; {fix}") from error
    except NotADirectoryError as error:
        raise DataError(f"{prefix}{printable(folder)} is not a folder; {fix}") from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(f"{prefix}{printable(folder)} cannot be listed: {reason}; {fix}") from error
    identity = (status.st_dev, status.st_ino)
    if identity in parents:  # links are followed, as many datasets consist of them, but not for ever
        raise DataError(f"{printable(folder)}: links to one of its parent folders; remove the link")
    return identity, visible


class FolderLister:
    """List the folders below `root`, whose images are the files for which `is_image` is true of their name.

    As a context it keeps the listings of folders when it exits without an error. `kind` tells listings with different
    `is_image` apart. Threads may share it.
    """

    def __init__(self, root: Path, is_image: Callable[[str], bool], kind: str) -> None:
        self._is_image = is_image
        self._key = json.dumps([_VERSION, os.path.realpath(root), kind, os.geteuid()])
        name = hashlib.sha256(self._key.encode()).hexdigest()[:32]
        self._file = expand_path(CACHE) / name
        self._kept = _read(self._file, self._key)
        self._listed: dict[str, _Kept] = {}
        self._is_changed = False
        self._file_systems = _find_file_systems()
        stamp = _read_stamp(os.fspath(root))
        is_local = stamp is not None and self._file_systems.get(stamp[0]) in _LOCAL
        self.num_threads = _LOCAL_THREADS if is_local else _NETWORK_THREADS

    def __enter__(self) -> "FolderLister":
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None and self._is_changed:
            _write(self._file, self._key, self._listed)

    def list_folder(self, folder: str, relative: str, parents: tuple[FolderId, ...]) -> tuple[FolderId, FolderListing]:
        """Return (device and inode, listing) of `folder`, which is `relative` to the root. Raise as `list_entries`."""
        now_s, stamp = time.time(), _read_stamp(folder)
        kept = self._kept.get(relative)
        if stamp and kept and kept.stamp == stamp and 0 <= now_s - kept.listed_s < _MAX_AGE_S:
            self._listed[relative] = kept
            return stamp[:2], kept.listing
        identity, entries = list_entries(folder, parents=parents)
        listing = self._sort_entries(entries)
        # Files with faults and those behind links may change without their folder. A change from now on will change the
        # stamp, which was taken first.
        if stamp and self._is_quiet(stamp, now_s) and not listing.faults and not _have_links(entries):
            self._listed[relative] = _Kept.from_listing(listing, stamp, now_s)
            self._is_changed = True
        return identity, listing

    def _is_quiet(self, stamp: Stamp, now_s: float) -> bool:
        return stamp[0] in self._file_systems and max(stamp[2:]) / 1e9 < now_s - _MIN_QUIET_S

    def _sort_entries(self, entries: Iterable[os.DirEntry[str]]) -> FolderListing:
        images, others, folders = [], [], []
        faults = {}
        for entry in entries:
            name = entry.name
            if self._is_image(name):
                images.append(name)
                if fault := find_fault(entry):
                    faults[os.fsencode(name)] = fault
            elif entry_kind(entry) == "folder":
                folders.append(name)
            else:
                others.append(name)
        return FolderListing(_encode(images), _encode(others), _encode(folders), faults)


def _encode(names: list[str]) -> list[bytes]:
    return os.fsencode("\0".join(names)).split(_SEPARATOR) if names else []  # four times as fast as one by one


def _have_links(entries: Iterable[os.DirEntry[str]]) -> bool:
    try:
        return any(entry.is_symlink() for entry in entries)
    except OSError:  # of an entry whose type the folder does not say
        return True


def _read_stamp(folder: str) -> Stamp | None:
    try:
        status = os.stat(folder)  # noqa: PTH116 - creating a Path takes as long
    except (OSError, ValueError):
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns


def _find_file_systems() -> dict[int, str]:
    """Return the mounted ones of `_LOCAL` and `_NETWORK` by device; none if that is not known."""
    found = {}
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in _MOUNTS.read_text(errors="surrogateescape").splitlines():
            # proc(5): major:minor is field 3, and the type follows the dash.
            before, _, after = line.partition(" - ")
            if (name := after.split()[0]) in _LOCAL | _NETWORK:
                found[os.makedev(*map(int, before.split()[2].split(":")))] = name
    return found


def _read(file: Path, key: str) -> dict[str, _Kept]:
    """Return the kept listings by relative folder; none if the file is missing, damaged or for another `key`."""
    try:
        with open_to_read(file, follow_links=False) as stream:
            if os.fstat(stream.fileno()).st_size > _MAX_BYTES:
                return {}
            content = stream.read()
        if int.from_bytes(content[:4], "little") != zlib.crc32(content[4:]):
            return {}
        header, _, names = content[4:].partition(b"\n")
        values = json.loads(header)
        folders = values["folders"] if values["key"] == key else []
        kept, start = {}, 0
        for relative, stamp, listed_s, sizes in folders:
            ends = list(accumulate(sizes, initial=start))
            parts = tuple(names[first:end] for first, end in pairwise(ends))
            kept[relative], start = _Kept(tuple(stamp), listed_s, parts), ends[-1]
        return kept
    except (OSError, ValueError, KeyError, TypeError, IndexError):  # only a cache
        return {}


def _write(file: Path, key: str, listed: dict[str, _Kept]) -> None:
    """Write `listed`, and remove the oldest files; do nothing for a small tree, or if that fails."""
    num_images = sum(each.names[0].count(_SEPARATOR) + bool(each.names[0]) for each in listed.values())
    folders = [(name, each.stamp, each.listed_s, [len(part) for part in each.names]) for name, each in listed.items()]
    content = json.dumps({"key": key, "folders": folders}).encode() + b"\n"
    content += b"".join(part for each in listed.values() for part in each.names)
    if num_images < MIN_IMAGES or len(content) >= _MAX_BYTES or not file.is_absolute():  # there is no home folder
        return
    with contextlib.suppress(OSError):
        make_folder(file.parent, 0o700, parents=True)
        with replace_file(file, sync=False) as stream:
            stream.write(zlib.crc32(content).to_bytes(4, "little"))
            stream.write(content)
        own = [path for path in file.parent.iterdir() if _FILE_NAME.fullmatch(path.name)]
        files = sorted(own, key=lambda path: path.stat().st_mtime_ns, reverse=True)
        for path in files[_MAX_FILES:]:
            path.unlink()
