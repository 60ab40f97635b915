"""Sample order: the sample indices, random draws and image size of every batch. Torch-free.

All of it is a pure function of seed, epoch, step, rank and world size, so resuming means starting at another
step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from paceline.core.random import Stream, permutation, uniform
from paceline.data.sampler import EpochOrder, Sampler, ShuffleSampler

# Beyond the seeds of recipes, so that a subset is independent of any training order.
_SUBSET_SEED = 2**63

# From a global step to the height and width of its images in pixels, such as `Plan.train_size`.
ImageSizeAtStep = Callable[[int], int]
# From a batch's uniform mixing draws and its step to the draws that mixing on a device needs, see `PairMixer.prepare`.
PrepareMixDraws = Callable[[NDArray[np.float64], int], NDArray[np.float64]]


@dataclass(frozen=True)
class TrainOrder:
    """Exact training order: global step s takes one slice of its epoch's order, and rank r the r-th part of it.

    Samples that do not fill a batch at the end of an epoch are dropped.
    """

    seed: int
    num_images: int
    batch_size: int
    rank: int = 0
    world_size: int = 1
    sampler: Sampler = field(default_factory=ShuffleSampler)

    @cached_property
    def steps_per_epoch(self) -> int:
        """Number of full batches per epoch."""
        return self.sampler.num_samples(self.num_images) // self.batch_size

    def epoch(self, step: int) -> int:
        """Return the epoch of global step `step`, both counted from 0."""
        return step // self.steps_per_epoch

    def indices(self, step: int) -> NDArray[np.int64]:
        """Return this rank's sample indices of global step `step`, int64 [rank_batch]."""
        return self._select(step).indices

    def draw_keys(self, step: int) -> NDArray[np.int64]:
        """Return the keys of the random draws of these samples, int64 [rank_batch]."""
        return self._select(step).draw_keys

    def _select(self, step: int) -> EpochOrder:
        epoch, position = divmod(step, self.steps_per_epoch)
        rank_batch = self.batch_size // self.world_size
        start = position * self.batch_size + self.rank * rank_batch
        return self.sampler.select(self.seed, epoch, start, start + rank_batch, self.num_images)


@dataclass(frozen=True)
class EvalShard:
    """One rank's consecutive samples of an evaluation; every sample belongs to exactly one rank, without padding.

    `num_images` samples are evaluated: all of the split, or a fixed random subset of `split_size` samples that depends
    on neither recipe, seed nor world size. With `has_same_batches`, the batches of all ranks together do not depend on
    their number.
    """

    num_images: int
    batch_size: int
    rank: int = 0
    world_size: int = 1
    split_size: int | None = None
    has_same_batches: bool = False

    def __post_init__(self) -> None:
        assert self.split_size is None or self.split_size >= self.num_images, (
            f"{self.num_images} of {self.split_size} samples"
        )

    @property
    def bounds(self) -> tuple[int, int]:
        """Half-open range of this rank's positions among the evaluated samples."""
        unit = self.batch_size if self.has_same_batches else 1
        units = -(-self.num_images // unit)
        first, stop = (rank * units // self.world_size * unit for rank in (self.rank, self.rank + 1))
        return min(first, self.num_images), min(stop, self.num_images)

    @property
    def num_batches(self) -> int:
        """Number of batches of this rank; it may differ between ranks, and be 0."""
        first, stop = self.bounds
        return -(-(stop - first) // self.batch_size)  # rounded up: the last batch may be smaller

    def indices(self, number: int) -> NDArray[np.int64]:
        """Return the sample indices of batch `number`, int64 [<= batch]."""
        first, stop = self.bounds
        start = first + number * self.batch_size
        stop = min(start + self.batch_size, stop)
        if self.split_size is None or self.split_size == self.num_images:
            return np.arange(start, stop, dtype=np.int64)
        return self._subset[start:stop]

    @cached_property
    def _subset(self) -> NDArray[np.int64]:
        assert self.split_size is not None
        # Sorted, so that files are read in order of their paths.
        return np.sort(permutation(_SUBSET_SEED, 0, self.split_size)[: self.num_images])


def draw_uniform(seed: int, epoch: int, keys: NDArray[np.int64], is_alternating: Sequence[bool]) -> NDArray[np.float64]:
    """Draw float64 [N, D] in [0, 1) for samples with `keys`, with D the length of `is_alternating`.

    A fresh draw changes every epoch. An alternating draw belongs to the sample and advances by 1/2 (mod 1) per epoch,
    so it is below 1/2 in every second epoch.
    """
    draws = uniform(seed, Stream.AUGMENT, epoch, keys, len(is_alternating))
    alternating = np.flatnonzero(is_alternating)
    if len(alternating):
        per_sample = uniform(seed, Stream.SAMPLE, 0, keys, len(alternating))
        draws[:, alternating] = (per_sample + 0.5 * (epoch % 2)) % 1.0
    return draws


@dataclass(frozen=True)
class TrainBatchSchedule:
    """The batch of each global step, with draws keyed by (seed, epoch, the order's `draw_keys`)."""

    order: TrainOrder
    size_at_step: ImageSizeAtStep
    is_alternating: Sequence[bool]  # one entry per draw
    num_mix_draws: int  # the last ones, which `prepare` converts
    prepare: PrepareMixDraws | None = None  # None: no mixing
    # Draw for several steps together: for small batches the fixed cost of numpy calls dominates.
    steps_per_draw: int = 1
    _drawn: dict[int, NDArray[np.float64]] = field(default_factory=dict, repr=False, compare=False)

    def indices(self, number: int) -> NDArray[np.int64]:
        """Return this rank's indices, int64 [rank_batch]."""
        return self.order.indices(number)

    def draws(self, number: int) -> NDArray[np.float64]:
        """Return the draws, float64 [rank_batch, D], read-only, in order of use: resizing, augmentation, mixing."""
        if self.steps_per_draw == 1:
            return self._draw_steps(number, number + 1)[0]
        if number not in self._drawn:
            self._drawn.clear()  # keep one group of steps
            epoch = self.order.epoch(number)
            # Draws depend on the epoch, so a group ends with it.
            stop = min(number + self.steps_per_draw, (epoch + 1) * self.order.steps_per_epoch)
            self._drawn.update(zip(range(number, stop), self._draw_steps(number, stop), strict=True))
        return self._drawn[number]

    def size(self, number: int) -> int:
        """Return the height and width in pixels of the images of global step `number`."""
        return self.size_at_step(number)

    def describe(self, number: int) -> str:
        """Name the global step in messages."""
        return f"the batch of step {number + 1:,}"

    def _draw_steps(self, first: int, stop: int) -> list[NDArray[np.float64]]:
        keys = np.concatenate([self.order.draw_keys(step) for step in range(first, stop)])
        draws = draw_uniform(self.order.seed, self.order.epoch(first), keys, self.is_alternating)
        draws_of_steps = np.split(draws, stop - first)
        if self.prepare:
            for step, own in enumerate(draws_of_steps, start=first):
                own[:, -self.num_mix_draws :] = self.prepare(own[:, -self.num_mix_draws :], step)
        return draws_of_steps


@dataclass(frozen=True)
class EvalBatchSchedule:
    """A rank's batches of an evaluation, without random draws."""

    shard: EvalShard
    image_size: int

    def indices(self, number: int) -> NDArray[np.int64]:
        """Return the sample indices, int64 [N]."""
        return self.shard.indices(number)

    def draws(self, number: int) -> NDArray[np.float64]:
        """Return float64 [N, 0]."""
        return np.empty((len(self.shard.indices(number)), 0))

    def size(self, number: int) -> int:
        """Return `image_size`."""
        return self.image_size

    def describe(self, number: int) -> str:
        """Name the batch in messages."""
        return f"evaluation batch {number + 1:,}"


# Samples, draws and image size of each batch.
BatchSchedule = TrainBatchSchedule | EvalBatchSchedule
