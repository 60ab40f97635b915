"""Metadata of a dataset, and the protocol of sources of samples."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.core.pixels import PixelFormat, PixelType

Split = Literal["train", "val"]
PixelArray = NDArray[np.uint8 | np.uint16 | np.float32]
Sample = tuple[bytes | PixelArray, int]


@dataclass(frozen=True)
class DatasetInfo:
    """Metadata of one split.

    `image_size` is (height, width) in pixels if every image has it, else None. `mean` and `std` are per channel, of
    pixels divided by `FULL_SCALE`; they are empty until they are measured (`data.sources.statistics`). `notes` are
    shown to the user once, such as a number of skipped files.
    """

    name: str
    split: Split
    num_images: int
    class_names: tuple[str, ...]
    channels: int
    image_size: tuple[int, int] | None
    mean: tuple[float, ...]
    std: tuple[float, ...]
    notes: tuple[str, ...] = field(default=())
    pixels: PixelType = "uint8"

    @property
    def num_classes(self) -> int:
        """Number of classes of the training split."""
        return len(self.class_names)

    @property
    def pixel_format(self) -> PixelFormat:
        """Channels and type of the pixels."""
        return PixelFormat(self.channels, self.pixels)


@dataclass(frozen=True, eq=False)
class JoinedNames:
    """N names in little memory: name i is `joined[ends[i - 1]:ends[i]]`."""

    joined: bytes | memoryview
    ends: NDArray[np.integer]  # [N]

    @classmethod
    def from_list(cls, names: Sequence[bytes]) -> "JoinedNames":
        """Join `names`."""
        return cls(b"".join(names), np.cumsum([len(name) for name in names], dtype=np.int64))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> bytes:
        start = int(self.ends[index - 1]) if index else 0
        return bytes(self.joined[start : int(self.ends[index])])


class Source(Protocol):
    """A map-style dataset of one split. It does not import torch, and is cheap to pickle for a worker process."""

    @property
    def info(self) -> DatasetInfo:
        """Metadata of this split."""
        ...

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def read(self, index: int) -> Sample:
        """Return (encoded file bytes, or pixels [H, W, C]; label). Raise `DataError` naming the sample."""
        ...

    def name_of(self, index: int) -> str:
        """Return the name of a sample for messages: its path, or `digits[12]`."""
        ...


@dataclass(frozen=True)
class ArraySource:
    """A split in memory: `images` [N, H, W, C] of one size and int64 `labels` [N]."""

    info: DatasetInfo
    images: PixelArray
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> Sample:
        """Return (pixels [H, W, C], label)."""
        return self.images[index], int(self.labels[index])

    def name_of(self, index: int) -> str:
        """Return `name/split[index]`."""
        return f"{self.info.name}/{self.info.split}[{index}]"


@dataclass(frozen=True)
class Datasets:
    """The training and validation split of one dataset, with the same classes."""

    train: Source
    val: Source
