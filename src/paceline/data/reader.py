"""From sample indices to uint8 images of one size: a gather when the pixels are in memory, else decode and size."""

from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchvision.transforms.v2 import functional as F

from paceline.core.dataset import Source
from paceline.core.errors import DataError
from paceline.data.augment.move import Move
from paceline.data.bad import BadImage, Instead
from paceline.data.decode import decode
from paceline.data.laps import Laps
from paceline.data.pixels import Pixels, ResidentPixels
from paceline.data.sizing import Picture, Sizing

Indices = NDArray[np.int64]


class Samples(NamedTuple):
    """What was read of N asked-for samples: K uint8 images [K, C, size, size] and their labels int64 [K].

    `kept`, bool [N], says of which: all but those that are left out because they cannot be read. `bad` are the
    different samples that could not be, in the order in which they were met.
    """

    images: Tensor
    labels: Tensor
    kept: NDArray[np.bool_]
    bad: tuple[BadImage, ...] = ()


class Reader(Protocol):
    """Read samples as uint8 [N, C, size, size] and labels as int64 [N], by `num_draws` draws a sample.

    The size, in pixels, may be another one at each reading.
    """

    @property
    def num_draws(self) -> int:
        """How many draws a sample uses."""
        ...

    def read(self, indices: Indices, draws: NDArray[np.float64], size: int) -> Samples:
        """Return the samples; `draws` is float64 [N, num_draws]. Raise `DataError` naming the sample."""
        ...


class ArrayReader:
    """Gather images that are already pixels of one size, all of a batch at once.

    By `laps`, gathering is reading, and bringing them to another size decoding.
    """

    num_draws = 0

    def __init__(self, pixels: Pixels, labels: NDArray[np.int64], laps: Laps) -> None:
        self._laps = laps
        self._pixels = pixels
        self._labels = torch.from_numpy(labels)

    def read(self, indices: Indices, draws: NDArray[np.float64], size: int) -> Samples:
        """Return (uint8 [N, C, size, size], int64 [N])."""
        images = self._pixels.gather(indices)
        self._laps.got(images.nbytes)
        if images.shape[-2:] != (size, size):
            images = F.resize(images, [size, size], antialias=True)
            self._laps.lap("decode")
        return Samples(images, self._labels[torch.from_numpy(indices)], np.ones(len(indices), dtype=np.bool_))


class MovedReader:
    """Gather images as `ArrayReader` does, and move their pixels by `move` on the way: no image is copied twice."""

    def __init__(self, pixels: ResidentPixels, labels: NDArray[np.int64], move: Move, laps: Laps) -> None:
        self._plain = ArrayReader(pixels, labels, laps)
        self._laps = laps
        self._images = pixels.images.numpy()
        self._labels = torch.from_numpy(labels)
        self._move = move
        self.num_draws = move.num_draws

    def read(self, indices: Indices, draws: NDArray[np.float64], size: int) -> Samples:
        """Return (uint8 [N, C, size, size], int64 [N])."""
        if not self._move.takes(size, size) or self._images.shape[-2:] != (size, size):
            read = self._plain.read(indices, draws, size)
            moved = read._replace(images=self._move(read.images, torch.from_numpy(draws)))
            self._laps.lap("augment")
            return moved
        images = self._move.gathered(self._images, indices, draws)
        self._laps.got(images.nbytes)
        return Samples(images, self._labels[torch.from_numpy(indices)], np.ones(len(indices), dtype=np.bool_))


class PictureReader:
    """Decode each sample and bring it to size by itself; `instead` says what becomes of one that cannot be read.

    A sample that stands in for another comes with its own label and the draws of the one that was asked for.
    """

    def __init__(self, source: Source, sizing: Sizing, instead: Instead, laps: Laps) -> None:
        self._source = source
        self._laps = laps
        self._sizing = sizing
        self._instead = instead
        self.num_draws = sizing.num_draws

    def read(self, indices: Indices, draws: NDArray[np.float64], size: int) -> Samples:
        """Return (uint8 [K, C, size, size], int64 [K]), and what was left out."""
        images, labels, kept = [], [], []
        bad: dict[int, BadImage] = {}
        for index, draw in zip(indices.tolist(), draws, strict=True):
            found = self._readable(index, bad)
            kept.append(found is not None)
            if found is not None:
                picture, label = found
                images.append(self._sizing(picture, draw, size))
                self._laps.lap("decode")
                labels.append(label)
        none = torch.empty(0, self._channels, size, size, dtype=torch.uint8)
        return Samples(
            torch.stack(images) if images else none,
            torch.tensor(labels, dtype=torch.int64),
            np.array(kept, dtype=np.bool_),
            tuple(bad.values()),
        )

    def _readable(self, index: int, bad: dict[int, BadImage]) -> tuple[Picture, int] | None:
        """Return the first readable of a sample and those that stand in for it, with its label; add others to `bad`."""
        at: int | None = index
        while at is not None:
            try:
                content, label = self._source.read(at)
                self._laps.got(len(content) if isinstance(content, bytes) else content.nbytes)
                return self._picture(content, at), label
            except DataError as error:
                bad.setdefault(at, BadImage.of(at, self._source.name_of(at), error))
                at = self._instead(at, len(self._source), bad, error)
        return None

    def _picture(self, content: bytes | NDArray[np.uint8], index: int) -> Picture:
        if isinstance(content, bytes):
            return decode(content, channels=self._channels, name=self._source.name_of(index))
        return torch.from_numpy(content.transpose(2, 0, 1).copy())

    @property
    def _channels(self) -> Literal[1, 3]:
        return 3 if self._source.info.channels == 3 else 1
