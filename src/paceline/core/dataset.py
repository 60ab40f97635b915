"""What a data set says about itself, and the protocol every source of samples follows."""

from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

Split = Literal["train", "val"]
Sample = tuple[bytes | NDArray[np.uint8], int]


@dataclass(frozen=True)
class DatasetInfo:
    """Facts of one split of a dataset.

    `image_size` is (height, width) in pixels if every image has it, else None. `mean` and `std` are per channel, of
    pixels scaled to [0, 1]. `notes` are sentences to show the user once, such as what was left out.
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

    @property
    def num_classes(self) -> int:
        """Number of classes of the training split."""
        return len(self.class_names)


class Source(Protocol):
    """A split as a map from 0..len-1 to samples: torch-free, and cheap to pickle for a worker process."""

    @property
    def info(self) -> DatasetInfo:
        """Facts of this split."""
        ...

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def read(self, index: int) -> Sample:
        """Return (encoded file bytes, or uint8 pixels [H, W, C]; label). Raise `DataError` naming the sample."""
        ...

    def name_of(self, index: int) -> str:
        """Return the name of a sample for messages: its path, or `digits[12]`."""
        ...


@dataclass(frozen=True)
class ArraySource:
    """A split that is already decoded: uint8 `images` [N, H, W, C] of one size and int64 `labels` [N]."""

    info: DatasetInfo
    images: NDArray[np.uint8]
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> Sample:
        """Return (uint8 pixels [H, W, C], label)."""
        return self.images[index], int(self.labels[index])

    def name_of(self, index: int) -> str:
        """Return `name/split[index]`."""
        return f"{self.info.name}/{self.info.split}[{index}]"


@dataclass(frozen=True)
class Datasets:
    """The training and validation split of one dataset, with the same classes."""

    train: Source
    val: Source
