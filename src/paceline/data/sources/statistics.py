"""Measure the mean and standard deviation of training images that have no known ones. Torch-free."""

from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.core.dataset import DatasetInfo, Datasets, Source
from paceline.core.errors import DataError
from paceline.core.pixels import FULL_SCALE
from paceline.core.units import count
from paceline.data.decode_array import decode_pixels
from paceline.recipe.schema.data import Data

# Images that are measured, evenly spaced over the training split.
MAX_IMAGES: Final = 1000
# Pixels that are converted to float64 together.
_BLOCK_PIXELS: Final = 1 << 18
_DIGITS: Final = 6


class Statistics(NamedTuple):
    """Mean and standard deviation per channel, of pixels divided by `FULL_SCALE`."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


def needs_statistics(info: DatasetInfo, data: Data) -> bool:
    """Whether a run on the training split `info` must measure it."""
    return not info.mean and "auto" in (data.mean, data.std)


def with_statistics(datasets: Datasets, statistics: Statistics) -> Datasets:
    """Return both splits with `statistics`."""
    return Datasets(_with_statistics(datasets.train, statistics), _with_statistics(datasets.val, statistics))


def _with_statistics(source: Source, statistics: Statistics) -> Source:
    changed: Any = source  # a dataclass with a field `info`, as all sources are
    selected: Source = replace(changed, info=replace(source.info, mean=statistics.mean, std=statistics.std))
    return selected


def with_measured(datasets: Datasets, *, skip_bad: bool) -> Datasets:
    """Return both splits with the statistics of the training split, measured unless they are known."""
    if datasets.train.info.mean:
        return datasets
    return with_statistics(datasets, measure_statistics(datasets.train, skip_bad=skip_bad))


def measure_statistics(source: Source, *, skip_bad: bool) -> Statistics:
    """Return the statistics of up to `MAX_IMAGES` images of `source`, evenly spaced, over all of their pixels.

    They are computed in float64 and rounded to 6 digits. With `skip_bad`, unreadable images are left out. Raise
    `DataError` for an unreadable image, or if there is no readable one.
    """
    info = source.info
    sums = _Sums(info.channels)
    for index in np.linspace(0, len(source) - 1, min(len(source), MAX_IMAGES)).round().astype(np.int64).tolist():
        try:
            pixels = decode_pixels(source.read(index)[0], info.pixel_format, name=source.name_of(index))
        except DataError:
            if not skip_bad:
                raise
            continue
        sums.add(pixels.reshape(-1, info.channels))
    if not sums.num:
        raise DataError(
            f"data.source: of {count(len(source), 'training image')} none can be read to measure data.mean and "
            "data.std (list the reasons with `paceline data verify`)"
        )
    scale = FULL_SCALE[info.pixels]
    stds = np.sqrt(sums.squares / sums.num) / scale
    # A constant channel stays 0 after normalization.
    return Statistics(tuple(map(_round, sums.mean / scale)), tuple(_round(std) or 1.0 for std in stds))


def _round(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


class _Sums:
    """Mean and sum of squared differences from it, float64 [C], updated by Chan, Golub and LeVeque's rule (1979)."""

    def __init__(self, channels: int) -> None:
        self.num, self.mean, self.squares = 0, np.zeros(channels), np.zeros(channels)

    def add(self, pixels: NDArray[np.generic]) -> None:
        """Add pixels [N, C]."""
        for first in range(0, len(pixels), _BLOCK_PIXELS):
            block = pixels[first : first + _BLOCK_PIXELS].astype(np.float64)
            mean, total = block.mean(axis=0), self.num + len(block)
            difference = mean - self.mean
            self.squares += ((block - mean) ** 2).sum(axis=0) + difference**2 * (self.num * len(block) / total)
            self.mean += difference * (len(block) / total)
            self.num = total
