"""Draw images by weights that are measured during a run (`data.sampler=hard`). Torch-free."""

from dataclasses import dataclass, field
from typing import final

import numpy as np
from numpy.typing import NDArray

from paceline.core.random import Stream, uniform
from paceline.data.sampler import EpochOrder, Indices, ShuffleSampler


@final
class ImageWeights:
    """How often each training image is drawn relative to the others, as measured after `step` steps of a run.

    `values`, int64 [M] and above 0, are empty before the first measurement.
    """

    def __init__(self) -> None:
        self.step = 0
        self.values: Indices = np.empty(0, dtype=np.int64)
        self._ends = np.empty(0)

    def update(self, values: Indices, step: int) -> None:
        """Replace the weights, while no iterator of a loader that draws by them is open."""
        self.values, self.step = values, step
        self._ends = np.cumsum(values).astype(np.float64)  # exact below 2**53

    @property
    def effective_images(self) -> float:
        """Effective sample size (Kish 1965): as many images with equal weights would be as varied."""
        return float(self._ends[-1] ** 2 / np.square(self.values.astype(np.float64)).sum())

    def draw(self, strata: Indices, places: NDArray[np.float64]) -> EpochOrder:
        """Draw one sample from each of `strata` int64 [N], at `places` float64 [N] in [0, 1) within them.

        Stratified resampling (Kitagawa 1996, doi:10.2307/1390750): the images lie side by side, as long as their
        weights, and this line is cut into M equal strata. With equal weights, stratum i is image i.
        """
        # Only operations that round alike on every processor, as the ranks must agree.
        length, last = self._ends[-1] / len(self._ends), len(self._ends) - 1
        indices = np.minimum(np.searchsorted(self._ends, (strata + places) * length, side="right"), last)
        first = ((self._ends[indices] - self.values[indices]) / length).astype(np.int64)
        return EpochOrder(indices, indices + np.maximum(0, strata - first) * len(self._ends))


@dataclass(frozen=True)
class HardSampler:
    """Visit every image once until `weights` are measured, and then draw as many samples by them."""

    weights: ImageWeights = field(default_factory=ImageWeights)
    _shuffle: ShuffleSampler = field(default_factory=ShuffleSampler, repr=False, compare=False)

    @property
    def digest(self) -> str:
        """No digest: a checkpoint holds the weights."""
        return ""

    def num_samples(self, num_images: int) -> int:
        """Return `num_images`."""
        return num_images

    def select(self, seed: int, epoch: int, first: int, stop: int, num_images: int) -> EpochOrder:
        """Return the samples of a range of strata in random order."""
        order = self._shuffle.select(seed, epoch, first, stop, num_images)
        if not len(self.weights.values):
            return order
        strata = order.indices
        return self.weights.draw(strata, uniform(seed, Stream.SAMPLER, epoch, strata, 1)[:, 0])
