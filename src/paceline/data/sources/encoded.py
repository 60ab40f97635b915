"""Splits whose images are files that are read on access."""

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from paceline.core.dataset import DatasetInfo, Sample, Split
from paceline.data.bad import ImageError
from paceline.data.sources.places import printable

# ImageNet statistics of torchvision's reference training; for grayscale, the means over the channels.
_IMAGENET_MEAN: dict[int, tuple[float, ...]] = {3: (0.485, 0.456, 0.406), 1: (0.449,)}
_IMAGENET_STD: dict[int, tuple[float, ...]] = {3: (0.229, 0.224, 0.225), 1: (0.226,)}


@dataclass(frozen=True, eq=False)
class ImageFileSource:
    """Image files below `root`, stored in 12 bytes plus the path per image.

    `paths` is the joined bytes of all N paths, relative to `root` or absolute; path i is `paths[ends[i - 1]:ends[i]]`.
    `ends` is int64 [N], `labels` int32 [N].
    """

    info: DatasetInfo
    root: str
    paths: bytes
    ends: NDArray[np.int64]
    labels: NDArray[np.int32]

    @classmethod
    def from_paths(
        cls, info: DatasetInfo, root: str, paths: Sequence[bytes], labels: NDArray[np.int32]
    ) -> "ImageFileSource":
        """Build a source from `paths` in file system encoding (`os.fsencode`) and int32 `labels` [N]."""
        assert len(paths) == len(labels), f"{len(paths)} paths for {len(labels)} labels"
        ends = np.cumsum([len(path) for path in paths], dtype=np.int64)
        return cls(info, root, b"".join(paths), ends, labels)

    def __len__(self) -> int:
        return len(self.labels)

    def get_listed_path(self, index: int) -> str:
        """Return the path of sample `index` as listed: relative to `root`, or absolute."""
        start = int(self.ends[index - 1]) if index else 0
        return os.fsdecode(self.paths[start : int(self.ends[index])])

    def get_path(self, index: int) -> Path:
        """Return the full path of sample `index`."""
        return Path(self.root, self.get_listed_path(index))

    def name_of(self, index: int) -> str:
        """Return the printable path of sample `index`."""
        return printable(self.get_path(index))

    def read(self, index: int) -> Sample:
        """Return (file bytes, label). Raise `ImageError` for a file that is missing, empty or not a regular file."""
        return self.read_bytes(index), int(self.labels[index])

    def read_bytes(self, index: int) -> bytes:
        """Return the bytes of file `index`."""
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
    channels: Literal[1, 3],
    notes: tuple[str, ...] = (),
) -> DatasetInfo:
    """Describe a split of image files of any size, normalized with ImageNet's statistics."""
    return DatasetInfo(
        name=name,
        split=split,
        num_images=num_images,
        class_names=class_names,
        channels=channels,
        image_size=None,
        mean=_IMAGENET_MEAN[channels],
        std=_IMAGENET_STD[channels],
        notes=notes,
    )
