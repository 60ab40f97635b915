"""Metadata of a dataset, and the protocol of sources of samples."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from paceline.core.pixels import PixelFormat, PixelType

Split = Literal["train", "val"]
PixelArray = NDArray[np.uint8 | np.uint16 | np.float32]
Sample = tuple[bytes | PixelArray, int]
LABEL_SHARE: Final = 0.5
"""Share of a class in a target from which evaluation counts the class as a label of the image."""
# For shares written with three decimals.
_SUM_TOLERANCE: Final = 1e-3


@dataclass(frozen=True, eq=False)
class TargetTable:
    """The distinct targets of images with several labels or with soft labels.

    `rows` is float32 [T, num_classes], with values from 0 to 1. The label of a sample is the number of its row.
    """

    rows: NDArray[np.float32]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TargetTable) and np.array_equal(self.rows, other.rows)

    def __hash__(self) -> int:
        return hash(self.rows.tobytes())

    @classmethod
    def from_targets(cls, targets: Iterable[NDArray[np.float32]], num_classes: int) -> tuple[Self, NDArray[np.int64]]:
        """Return the table of N targets [num_classes], and the number of the row of each, int64 [N]."""
        numbers: dict[bytes, int] = {}
        labels = [numbers.setdefault(target.tobytes(), len(numbers)) for target in targets]
        rows = np.frombuffer(b"".join(numbers), dtype=np.float32).reshape(len(numbers), num_classes)
        return cls(rows), np.array(labels, dtype=np.int64)

    @property
    def sums(self) -> NDArray[np.float64]:
        """Sum of each row, float64 [T]."""
        return np.asarray(self.rows.sum(axis=1, dtype=np.float64))

    @property
    def are_distributions(self) -> bool:
        """Whether each row sums to 1, as softmax needs."""
        return bool((np.abs(self.sums - 1) <= _SUM_TOLERANCE).all())

    @property
    def has_shares(self) -> bool:
        """Whether a value is neither 0 nor 1."""
        return bool(((self.rows != 0) & (self.rows != 1)).any())


@dataclass(frozen=True)
class DatasetInfo:
    """Metadata of one split.

    `image_size` is (height, width) in pixels if every image has it, else None. `mean` and `std` are per channel, of
    pixels divided by `FULL_SCALE`; they are empty until they are measured (`data.sources.statistics`). `notes` are
    shown to the user once, such as a number of skipped files. With `targets`, the label of a sample is not a class but
    the number of a row of the table.
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
    targets: TargetTable | None = field(default=None, repr=False)
    pixels: PixelType = "uint8"

    @property
    def num_classes(self) -> int:
        """Number of classes of the training split."""
        return len(self.class_names)

    @property
    def pixel_format(self) -> PixelFormat:
        """Channels and type of the pixels."""
        return PixelFormat(self.channels, self.pixels)

    def count_classes(self, labels: NDArray[np.integer]) -> NDArray[Any]:
        """Return the images per class, [num_classes], for integer `labels` [N].

        They are int64, or with `targets` float64, as soft labels count by their shares.
        """
        if self.targets is None:
            return np.bincount(labels, minlength=self.num_classes)
        of_rows = np.bincount(labels, minlength=len(self.targets.rows))
        return np.asarray(of_rows @ self.targets.rows.astype(np.float64))


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

    def take(self, indices: NDArray[np.int64]) -> "JoinedNames":
        """Return the names at `indices`, int64 [K], in that order."""
        return JoinedNames.from_list([self[index] for index in indices.tolist()])


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
    """A split in memory: `images` [N, H, W, C] of one size and int64 `labels` [N].

    `positions`, int64 [N], are those of selected images among all, by which they are named.
    """

    info: DatasetInfo
    images: PixelArray
    labels: NDArray[np.int64]
    positions: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> Sample:
        """Return (pixels [H, W, C], label)."""
        return self.images[index], int(self.labels[index])

    def name_of(self, index: int) -> str:
        """Return `name/split[index]`, or of a selected image `name[position]`."""
        if self.positions is not None:
            return f"{self.info.name}[{self.positions[index]}]"
        return f"{self.info.name}/{self.info.split}[{index}]"


def has_one_size(source: Source) -> bool:
    """Return whether all images of `source` have the same size."""
    return isinstance(source, ArraySource) or source.info.image_size is not None


@dataclass(frozen=True)
class Datasets:
    """The training and validation split of one dataset, with the same classes."""

    train: Source
    val: Source
