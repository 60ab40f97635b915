"""Splits whose images are files: read them, find unreadable ones in a listing, and select a validation split."""

import hashlib
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.core.dataset import DatasetInfo, JoinedNames, Sample, Source, Split
from paceline.core.errors import DataError
from paceline.core.pixels import PixelFormat
from paceline.core.units import count
from paceline.data.bad_images import ImageError
from paceline.data.extra_formats import require_decoders
from paceline.data.files import printable

# ImageNet statistics of torchvision's reference training; for grayscale, the means over the channels.
_IMAGENET_MEAN: dict[int, tuple[float, ...]] = {3: (0.485, 0.456, 0.406), 1: (0.449,)}
_IMAGENET_STD: dict[int, tuple[float, ...]] = {3: (0.229, 0.224, 0.225), 1: (0.226,)}
_MAX_FAULTS_SHOWN = 5


class LocatedFiles(NamedTuple):
    """Where N encoded images lie: the absolute path of each in file system encoding, or its content, or None.

    `offsets` and `lengths`, uint64 [N], are the part of the file at a path, both 0 for the whole file. `names` tell the
    images of a dataset apart.
    """

    files: list[bytes | memoryview | None]
    offsets: NDArray[np.uint64]
    lengths: NDArray[np.uint64]
    names: list[bytes]

    @classmethod
    def from_paths(cls, paths: list[bytes]) -> "LocatedFiles":
        """Return where N whole files lie."""
        zeros = np.zeros(len(paths), dtype=np.uint64)
        return cls([*paths], zeros, zeros, paths)

    def take(self, rows: slice | NDArray[np.int64]) -> "LocatedFiles":
        """Return some of the images."""
        numbers = range(len(self.files))[rows] if isinstance(rows, slice) else rows.tolist()
        files, names = [self.files[row] for row in numbers], [self.names[row] for row in numbers]
        return LocatedFiles(files, self.offsets[rows], self.lengths[rows], names)

    def without(self, is_left_out: NDArray[np.bool_]) -> "LocatedFiles":
        """Return the images with None in place of some files."""
        files = [None if skip else file for file, skip in zip(self.files, is_left_out.tolist(), strict=True)]
        return self._replace(files=files)


class FileSource(Source, Protocol):
    """A source whose images the native extension can read, as they are files, parts of files or bytes in memory."""

    @property
    def file_root(self) -> str:
        """Folder of the dataset, under which its indexes are cached."""
        ...

    def locate_files(self, indices: NDArray[np.int64]) -> LocatedFiles:
        """Return where images lie, int64 [N]; None in place of the file of one that only `read` can read."""
        ...


@dataclass(frozen=True, eq=False)
class ImageFileSource:
    """N image files below `root`; `paths` are relative to it or absolute. Takes 12 bytes plus the path per image."""

    info: DatasetInfo
    root: str
    paths: JoinedNames
    labels: NDArray[np.int32]  # [N]

    @classmethod
    def from_paths(
        cls, info: DatasetInfo, root: str, paths: Sequence[bytes], labels: NDArray[np.int32]
    ) -> "ImageFileSource":
        """Build a source from N `paths` in file system encoding (`os.fsencode`) and int32 `labels` [N].

        Raise `RecipeError` if a package is missing that decodes one of them.
        """
        assert len(paths) == len(labels), f"{len(paths)} paths for {len(labels)} labels"
        extensions = {path.rpartition(b".")[2].lower() for path in paths}
        require_decoders({os.fsdecode(each) for each in extensions}, info.pixel_format)
        return cls(info, root, JoinedNames.from_list(paths), labels)

    def __len__(self) -> int:
        return len(self.labels)

    def get_listed_path(self, index: int) -> str:
        """Return the path as listed: relative to `root`, or absolute."""
        return os.fsdecode(self.paths[index])

    def get_path(self, index: int) -> Path:
        """Return the full path."""
        return Path(self.root, self.get_listed_path(index))

    def name_of(self, index: int) -> str:
        """Return the printable full path."""
        return printable(self.get_path(index))

    @property
    def file_root(self) -> str:
        """The root."""
        return self.root

    def locate_files(self, indices: NDArray[np.int64]) -> LocatedFiles:
        """Return the paths of images, int64 [N]."""
        prefix = os.fsencode(self.root) + b"/"
        listed = [self.paths[index] for index in indices.tolist()]
        return LocatedFiles.from_paths([path if path.startswith(b"/") else prefix + path for path in listed])

    def read(self, index: int) -> Sample:
        """Return (file bytes, label). Raise `ImageError` for a file that is missing, empty or not a regular file."""
        return self.read_bytes(index), int(self.labels[index])

    def read_bytes(self, index: int) -> bytes:
        """Return the bytes of a file. Raise `ImageError` as `read`."""
        path = self.get_path(index)
        try:
            # Without O_NONBLOCK, opening a pipe in place of the file would hang the run.
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            with os.fdopen(descriptor, "rb", buffering=0) as file:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise ImageError(printable(path), "is not a regular file", "remove it or replace it")
                data = file.readall()
        except OSError as error:
            reason = error.strerror or error
            raise ImageError(printable(path), f"cannot be read: {reason}", "remove it or restore it") from error
        if not data:
            raise ImageError(printable(path), "is empty (0 bytes)", "remove it or replace it")
        return data


def build_files_info(
    name: str,
    split: Split,
    num_images: int,
    class_names: tuple[str, ...],
    form: PixelFormat,
    notes: tuple[str, ...] = (),
) -> DatasetInfo:
    """Build the facts of a split of images of any size.

    8-bit gray or RGB is normalized with ImageNet's statistics, others with those that `sources.statistics` measures.
    """
    return DatasetInfo(
        name=name,
        split=split,
        num_images=num_images,
        class_names=class_names,
        channels=form.channels,
        image_size=None,
        mean=_IMAGENET_MEAN[form.channels] if form.is_photo else (),
        std=_IMAGENET_STD[form.channels] if form.is_photo else (),
        notes=notes,
        pixels=form.pixels,
    )


def has_imagenet_statistics(info: DatasetInfo) -> bool:
    """Return whether the statistics of `info` are ImageNet's, which do not depend on the images."""
    return bool(info.mean) and info.mean == _IMAGENET_MEAN.get(info.channels)


def find_fault(entry: os.DirEntry[str]) -> str:
    """Return why an entry cannot be an image file (a pipe, a dangling link, empty, no permission, ...), or ""."""
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
    """Yield (name, reason) of files that are missing or have a fault; `paths` maps names to absolute paths."""
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
    """Raise `DataError` with the number of faults and the first few, unless there are none."""
    if not faults:
        return
    first = sorted(faults, key=os.fsencode)[:_MAX_FAULTS_SHOWN]
    named = ", ".join(f"{printable(name)} ({faults[name]})" for name in first)
    more = ", ..." if len(faults) > len(first) else ""
    raise DataError(
        f"{root}: {count(len(faults), 'image')} cannot be read: {named}{more}; remove or replace them, or set "
        f"data.on_bad_image=skip"
    )


def select_validation(
    labels: NDArray[np.integer], names: Iterable[bytes], *, fraction: float, seed: int
) -> NDArray[np.bool_]:
    """Return a bool mask [N] of the validation samples: the rounded `fraction` of each class.

    Classes of two or more samples have some in each split, a single sample is for training. `labels` is [N], `names`
    yields N names.
    """
    # Those with the smallest keyed hashes of their names, so that neither the order of the samples nor other classes
    # matter.
    key = hashlib.blake2b(str(seed).encode()).digest()
    digests = b"".join(hashlib.blake2b(name, key=key, digest_size=8).digest() for name in names)
    hashes = np.frombuffer(digests, dtype="<u8")
    assert len(hashes) == len(labels), f"{len(hashes)} names for {len(labels)} labels"

    _, classes, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    quotas = np.clip(np.floor(sizes * fraction + 0.5).astype(np.int64), 1, np.maximum(sizes - 1, 1))
    quotas[sizes == 1] = 0
    order = np.lexsort((hashes, classes))
    starts = np.cumsum(sizes) - sizes
    rank_in_class = np.arange(len(labels)) - starts[classes[order]]
    mask = np.zeros(len(labels), dtype=np.bool_)
    mask[order] = rank_in_class < quotas[classes[order]]
    return mask
