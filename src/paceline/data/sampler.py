"""Samplers: which images an epoch visits, in which order, and the keys of their random draws. Torch-free.

An epoch's order is a pure function of seed, epoch and number of images, so every rank computes all of it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, Self, final

import numpy as np
from numpy.typing import NDArray

from paceline.core.random import Stream, permutation, uniform
from paceline.recipe.plugins import SAMPLER, PluginRef
from paceline.recipe.schema.data import Data
from paceline.recipe.schema.sampler import Hard, OwnSampler, Repeated

Indices = NDArray[np.int64]


class EpochOrder(NamedTuple):
    """The samples of an epoch: image `indices` int64 [M], and `draw_keys` int64 [M], which key their random draws."""

    indices: Indices
    draw_keys: Indices

    @classmethod
    def from_indices(cls, indices: Indices, num_images: int) -> Self:
        """Key each sample by its image and by how often the image came before, so that its draws differ each time."""
        rows = np.argsort(indices, kind="stable")
        ordered = indices[rows]
        repeats = np.empty_like(indices)
        repeats[rows] = np.arange(len(rows)) - np.searchsorted(ordered, ordered)
        return cls(indices, indices + repeats * num_images)


class Sampler(Protocol):
    """The order of each epoch."""

    def num_samples(self, num_images: int) -> int:
        """Return the samples per epoch, M."""
        ...

    def order(self, seed: int, epoch: int, num_images: int) -> EpochOrder:
        """Return the order of `epoch`, counted from 0."""
        ...


@dataclass(frozen=True)
class ShuffleSampler:
    """Visit every image once, in a new random order in each epoch, or in the order of the source."""

    is_random: bool = True

    def num_samples(self, num_images: int) -> int:
        """Return `num_images`."""
        return num_images

    def order(self, seed: int, epoch: int, num_images: int) -> EpochOrder:
        """Return a permutation."""
        indices = permutation(seed, epoch, num_images) if self.is_random else np.arange(num_images, dtype=np.int64)
        return EpochOrder(indices, indices)


@dataclass(frozen=True)
class RepeatedSampler:
    """Repeat each image of a random order `repeats` times (Hoffer et al. 2020, arXiv 1901.09335).

    A batch has the same samples as with timm's `RepeatAugSampler`, whose ranks take every world_size-th of them. Here
    it has all first versions of its images, then all second ones, and so on: then any number of ranks divides them
    alike, and versions of one image are neither mixed with each other nor, on more than a few ranks, together on one.
    """

    repeats: int
    batch_size: int

    def num_samples(self, num_images: int) -> int:
        """Return `num_images`."""
        return num_images

    def order(self, seed: int, epoch: int, num_images: int) -> EpochOrder:
        """Return the first `num_images` samples."""
        position = np.arange(num_images)
        batch, version = position // self.batch_size, position % self.repeats
        position = np.argsort(batch * self.repeats + version, kind="stable")
        indices = permutation(seed, epoch, num_images)[position // self.repeats]
        return EpochOrder(indices, indices + position % self.repeats * num_images)


@final
class ImageWeights:
    """How often each training image is drawn relative to the others, as measured after `step` steps of a run.

    `values` int64 [M] are above 0, and empty before the first measurement.
    """

    def __init__(self) -> None:
        self.step = 0
        self.values: Indices = np.empty(0, dtype=np.int64)
        self._ends = np.empty(0)

    def update(self, values: Indices, step: int) -> None:
        """Replace the weights. No iterator of a loader that draws by them may be open."""
        self.values, self.step = values, step
        self._ends = np.cumsum(values).astype(np.float64)

    @property
    def effective_images(self) -> float:
        """Kish's effective sample size: the number of images that the same draws with equal weights would come from."""
        weights = self.values.astype(np.float64)
        return float(weights.sum() ** 2 / np.square(weights).sum())

    def draw(self, strata: Indices, places: NDArray[np.float64]) -> EpochOrder:
        """Draw one sample from each of `strata` int64 [N], at `places` float64 [N] in [0, 1) within them.

        The images lie side by side, as long as their weights, and this line is cut into M strata of equal length
        (stratified resampling, Kitagawa 1996, doi 10.2307/1390750): an image of twice the mean weight is drawn once to
        three times, and with equal weights stratum i is image i.
        """
        length, last = self._ends[-1] / len(self._ends), len(self._ends) - 1
        indices = np.minimum(np.searchsorted(self._ends, (strata + places) * length, side="right"), last)
        first = ((self._ends[indices] - self.values[indices]) / length).astype(np.int64)
        return EpochOrder(indices, indices + np.maximum(0, strata - first) * len(self._ends))


@dataclass(frozen=True)
class HardSampler:
    """Draw images by `weights`, from the first measurement on; before it, visit every image once."""

    weights: ImageWeights

    def num_samples(self, num_images: int) -> int:
        """Return `num_images`."""
        return num_images

    def order(self, seed: int, epoch: int, num_images: int) -> EpochOrder:
        """Return the samples in the random order of their strata."""
        strata = permutation(seed, epoch, num_images)
        if not len(self.weights.values):
            return EpochOrder(strata, strata)
        return self.weights.draw(strata, uniform(seed, Stream.STRATUM, epoch, strata, 1)[:, 0])


@dataclass(frozen=True)
class PluginSampler:
    """Call the plugin `inner`. Raise `RecipeError` if it raises, or returns anything but indices of images."""

    inner: Callable[[int, int, int], Any]
    plugin: PluginRef
    _counted: dict[int, int] = field(default_factory=dict, repr=False, compare=False)

    def num_samples(self, num_images: int) -> int:
        """Return the samples of epoch 0, which every epoch must have."""
        if num_images not in self._counted:
            first, second = (self.call(0, 0, num_images) for _ in range(2))
            # Ranks that disagree would train on the same images twice, and a resumed run on others.
            if not np.array_equal(first, second):
                problem = "returns two orders for one seed and epoch"
                raise self.plugin.error(f"{problem} (draw from a generator that is seeded with both)")
            self._counted[num_images] = len(first)
        return self._counted[num_images]

    def order(self, seed: int, epoch: int, num_images: int) -> EpochOrder:
        """Return the plugin's order."""
        indices = self.call(seed, epoch, num_images)
        expected = self.num_samples(num_images)
        if len(indices) != expected:
            raise self.plugin.error(
                f"returns {len(indices):,} indices for epoch {epoch}, and {expected:,} for epoch 0 (return as many)"
            )
        return EpochOrder.from_indices(indices, num_images)

    def call(self, seed: int, epoch: int, num_images: int) -> Indices:
        """Return the valid indices, int64 [M], of any length above 0."""
        with self.plugin.reporting():
            indices = self.inner(seed, epoch, num_images)
        is_array = isinstance(indices, np.ndarray)
        if not is_array or indices.dtype != np.int64 or indices.ndim != 1 or not len(indices):
            returned = f"{indices.dtype} {list(indices.shape)}" if is_array else type(indices).__name__
            raise self.plugin.error(f"returns {returned} (return the indices of samples, a numpy array int64 [M])")
        if indices.min() < 0 or indices.max() >= num_images:
            outside = indices[(indices < 0) | (indices >= num_images)][0]
            raise self.plugin.error(f"returns index {outside} (return 0 to {num_images - 1} for {num_images:,} images)")
        valid: Indices = indices
        return valid


def build_sampler(data: Data, weights: ImageWeights | None = None) -> Sampler:
    """Build the sampler of `data`, whose batch is resolved. Raise `RecipeError` for an invalid plugin.

    `weights` are those of the sampler `hard`, which the run updates.
    """
    match data.sampler:
        case Hard():
            return HardSampler(weights or ImageWeights())
        case Repeated(repeats=repeats):
            return RepeatedSampler(repeats, data.global_batch_size)
        case OwnSampler(name=name, args=args):
            plugin = PluginRef("data.sampler", name, args, SAMPLER)
            return PluginSampler(plugin.make(), plugin)
    return ShuffleSampler(is_random=data.order == "random")
