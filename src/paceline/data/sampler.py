"""Samplers: which images an epoch visits, in which order, and the keys of their random draws. Torch-free.

The samples of any range of an epoch are a pure function of seed, epoch, positions, number of images, and the labels or
values that the sampler holds, whose digest is saved with a run. So every rank selects its own part.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cached_property
from typing import Any, Final, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from paceline.core.random import Stream, exponential, permutation, permute, stable_argsort, uniform_pairs
from paceline.recipe.plugins import PluginRef

MAX_TABLE_IMAGES: Final = 2**24
"""Most images whose shuffled order is a table, 8 bytes per image; beyond, each position is computed by itself."""

MIN_WEIGHT: Final = 1e-200
MAX_WEIGHT: Final = 1e200

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
    """The samples of each epoch."""

    @property
    def digest(self) -> str:
        """16 hex digits that identify the labels or values that the samples depend on; "" without any."""
        ...

    def num_samples(self, num_images: int) -> int:
        """Return the samples per epoch, M."""
        ...

    def select(self, seed: int, epoch: int, first: int, stop: int, num_images: int) -> EpochOrder:
        """Return the samples `first` to `stop` - 1 of `epoch`, all counted from 0, with `stop` at most M."""
        ...


class WholeEpochSampler(ABC):
    """A sampler that computes the order of a whole epoch at once."""

    @property
    def digest(self) -> str:
        """No digest: the order depends on the number of images alone."""
        return ""

    @abstractmethod
    def num_samples(self, num_images: int) -> int:
        """Return the samples per epoch, M."""

    @abstractmethod
    def order(self, seed: int, epoch: int, num_images: int) -> EpochOrder:
        """Return the M samples of `epoch`, counted from 0."""

    def select(self, seed: int, epoch: int, first: int, stop: int, num_images: int) -> EpochOrder:
        """Return a part of the order of `epoch`, which is computed once."""
        key = (seed, epoch, num_images)
        order = self._orders.get(key)
        if order is None:
            order = self.order(seed, epoch, num_images)
            # Keep two epochs: at a boundary, threads work on both. An order of 10 M samples takes up to 160 MB.
            for old in sorted(self._orders)[:-1]:
                self._orders.pop(old, None)
            self._orders[key] = order
        return EpochOrder(order.indices[first:stop], order.draw_keys[first:stop])

    @cached_property
    def _orders(self) -> dict[tuple[int, int, int], EpochOrder]:
        return {}


@dataclass(frozen=True)
class _ShuffleTable(WholeEpochSampler):
    def num_samples(self, num_images: int) -> int:
        return num_images

    def order(self, seed: int, epoch: int, num_images: int) -> EpochOrder:
        indices = permutation(seed, epoch, num_images)
        return EpochOrder(indices, indices)


@dataclass(frozen=True)
class ShuffleSampler:
    """Visit every image once, in a new random order in each epoch, or in the order of the source.

    Of more than 2**24 images, a range takes time and memory for its own samples alone.
    """

    is_random: bool = True
    _table: _ShuffleTable = field(default_factory=_ShuffleTable, repr=False, compare=False)

    @property
    def digest(self) -> str:
        """No digest: the order depends on the number of images alone."""
        return ""

    def num_samples(self, num_images: int) -> int:
        """Return `num_images`."""
        return num_images

    def select(self, seed: int, epoch: int, first: int, stop: int, num_images: int) -> EpochOrder:
        """Return a range of the permutation."""
        if self.is_random and num_images <= MAX_TABLE_IMAGES:
            return self._table.select(seed, epoch, first, stop, num_images)
        positions = np.arange(first, stop, dtype=np.int64)
        indices = permute(seed, epoch, positions, num_images) if self.is_random else positions
        return EpochOrder(indices, indices)


@dataclass(frozen=True)
class RepeatedSampler(WholeEpochSampler):
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


@dataclass(frozen=True)
class PluginSampler(WholeEpochSampler):
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


@dataclass(frozen=True, eq=False)
class WeightedSampler:
    """Draw each sample independently, image i with probability `weights[i]` / sum, with replacement.

    `weights` are float64 [N], each 0 or from 1e-200 to 1e200, and not all 0. A draw inverts the cumulative distribution
    (Devroye 1986, "Non-Uniform Random Variate Generation", chapter III.2), in O(log N). An epoch has `samples` samples,
    by default as many as images.
    """

    weights: NDArray[np.float64]
    samples: int | None = None

    def __post_init__(self) -> None:
        assert self._cumulative[-1] > 0  # computed here, so that forked workers share it

    @cached_property
    def digest(self) -> str:
        """Digest of the weights."""
        return digest_array(self.weights)

    def num_samples(self, num_images: int) -> int:
        """Return `samples`, or `num_images`."""
        return num_images if self.samples is None else self.samples

    def select(self, seed: int, epoch: int, first: int, stop: int, num_images: int) -> EpochOrder:
        """Draw a range of samples, whose random draws are keyed by their positions."""
        assert num_images == len(self.weights), f"{num_images} images, {len(self.weights)} weights"
        positions = np.arange(first, stop, dtype=np.int64)
        total = self._cumulative[-1]
        places = uniform_pairs(seed, Stream.SAMPLER, epoch, positions)[:, 0] * total
        # Below the total, which rounding can reach: no image has the place of the total.
        places = np.minimum(places, np.nextafter(total, 0))
        return EpochOrder(np.searchsorted(self._cumulative, places, side="right"), positions)

    @cached_property
    def _cumulative(self) -> NDArray[np.float64]:
        return np.cumsum(self.weights)


@dataclass(frozen=True, eq=False)
class DistinctWeightedSampler(WholeEpochSampler):
    """Draw `samples` different images per epoch by weight, one after the other from those that are left.

    `weights` are float64 [N], as of `WeightedSampler`, with at least `samples` above 0. The images with the smallest
    exponential variates divided by weights are drawn (Efraimidis and Spirakis 2006, doi:10.1016/j.ipl.2005.11.003), and
    then shuffled: otherwise the heaviest would always come first.
    """

    weights: NDArray[np.float64]
    samples: int

    @cached_property
    def digest(self) -> str:
        """Digest of the weights."""
        return digest_array(self.weights)

    def num_samples(self, num_images: int) -> int:
        """Return `samples`."""
        return self.samples

    def order(self, seed: int, epoch: int, num_images: int) -> EpochOrder:
        """Return the images drawn, in a random order."""
        images = np.flatnonzero(self.weights)
        draws = uniform_pairs(seed, Stream.SAMPLER, epoch, images)
        drawn = _argsort_positive(exponential(draws[:, 0]) / self.weights[images])[: self.samples]
        indices = images[drawn[_argsort_positive(draws[drawn, 1])]]
        return EpochOrder(indices, indices)


@dataclass(frozen=True, eq=False)
class SubsetSampler:
    """Visit the fixed `images`, int64 [M], once per epoch, in a new random order."""

    images: Indices
    shuffle: ShuffleSampler = field(default_factory=ShuffleSampler)

    @cached_property
    def digest(self) -> str:
        """Digest of the images."""
        return digest_array(self.images)

    def num_samples(self, num_images: int) -> int:
        """Return M."""
        return len(self.images)

    def select(self, seed: int, epoch: int, first: int, stop: int, num_images: int) -> EpochOrder:
        """Return a range of the permutation."""
        indices = self.images[self.shuffle.select(seed, epoch, first, stop, len(self.images)).indices]
        return EpochOrder(indices, indices)


@dataclass(frozen=True, eq=False)
class CurriculumSampler(WholeEpochSampler):
    """Begin with the easiest images, and add harder ones epoch by epoch (Bengio et al. 2009, "Curriculum learning").

    `images`, int64 [N], are all images, the easiest first. Their share in use rises linearly from `begin` in epoch 0 to
    1 in epoch `full_epoch` (the linear pacing of Platanios et al. 2019, arXiv 1903.09848). An epoch has N samples:
    images in use are repeated as often as that takes, each time in a new random order, of which the last is cut off.
    """

    images: Indices
    begin: float
    full_epoch: float

    @cached_property
    def digest(self) -> str:
        """Digest of the order of the images."""
        return digest_array(self.images)

    def num_samples(self, num_images: int) -> int:
        """Return `num_images`."""
        return num_images

    def num_used(self, epoch: int) -> int:
        """Return the number of images in use in `epoch`."""
        progress = 1.0 if epoch >= self.full_epoch else epoch / self.full_epoch
        return max(1, round(len(self.images) * (self.begin + (1 - self.begin) * progress)))

    def order(self, seed: int, epoch: int, num_images: int) -> EpochOrder:
        """Return the images in use, in as many rounds as fill the epoch."""
        num_used = self.num_used(epoch)
        # The last round may be a part of the images: any of them, not the easiest.
        used = self.images[permutation(seed, epoch, num_used, Stream.SAMPLER)]
        rounds, places = np.divmod(permutation(seed, epoch, num_images), num_used)
        in_rounds = np.argsort(rounds, kind="stable")
        indices = used[places[in_rounds]]
        return EpochOrder(indices, indices + rounds[in_rounds] * num_images)


def _argsort_positive(values: NDArray[np.float64]) -> Indices:
    """Return the stable order of `values` that are at least 0, int64 [N]."""
    # The bits of such floats, read as integers, have the same order. `+ 0.0` turns -0.0 into 0.0.
    return stable_argsort((values + 0.0).view(np.uint64))


def choose_subset(seed: int, num_images: int, size: int, labels: NDArray[np.integer] | None = None) -> Indices:
    """Return a random subset of `size` images, int64 [size], ascending, the same for every training seed.

    With `labels` [N] it has the rounded share of each class, up or down.
    """
    order = permutation(seed, 0, num_images, Stream.SUBSET)
    if labels is None:
        return np.sort(order[:size])
    # Every (N / size)-th image of those sorted by class, and at random within a class.
    by_class = order[np.argsort(labels[order], kind="stable")]
    places = np.arange(size, dtype=np.int64) * num_images // size
    return np.sort(by_class[places])


def rank_images(values: NDArray[np.float64], *, is_descending: bool) -> Indices:
    """Return all images by their `values` [N], int64 [N], with equal ones in a random but fixed order."""
    order = permutation(0, 0, len(values), Stream.SUBSET)
    return order[np.argsort(-values[order] if is_descending else values[order], kind="stable")]


def find_unusable_weights(weights: NDArray[np.float64]) -> Indices:
    """Return the positions of weights that are neither 0 nor from 1e-200 to 1e200, int64 [W]."""
    # Such as negative ones and NaN. The sums and quotients of others neither overflow nor round to 0.
    return np.flatnonzero(~((weights == 0) | ((weights >= MIN_WEIGHT) & (weights <= MAX_WEIGHT))))


def inverse_powers(counts: NDArray[np.integer], power: float) -> NDArray[np.float64]:
    """Return `counts` to the power -`power`, float64 of the same shape, with 1 in place of counts below 1."""
    # In decimals, which are rounded in the same way on every processor, unlike `**` of floats.
    exponent = Decimal(str(-power))
    return np.array([float(Decimal(max(1, images)) ** exponent) for images in counts.tolist()])


def digest_array(values: NDArray[Any]) -> str:
    """Return 16 hex digits that identify the numbers of an array."""
    little_endian = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<"))
    return hashlib.sha256(little_endian.data).hexdigest()[:16]
