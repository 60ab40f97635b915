"""Which samples a step takes. Pure: the answer depends on the seed and the step, and on the world only by slicing."""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from paceline.core.philox import permutation

_SUBSET_SEED = 2**63
"""Beyond the seeds of recipes, so that a subset has nothing in common with an order of training."""


@dataclass(frozen=True)
class TrainOrder:
    """The exact order of training: global step s takes one slice of its epoch's permutation.

    Rank r of W takes the r-th part of that slice, so another world size divides the same slices differently, and
    resuming is starting at another step. What does not fill a batch at the end of an epoch is left out. Without
    `is_random` every epoch is 0, 1, 2, ... instead, and leaves out the same samples.
    """

    seed: int
    num_images: int
    batch_size: int
    rank: int = 0
    world_size: int = 1
    is_random: bool = True
    _cache: dict[int, NDArray[np.int64]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def steps_per_epoch(self) -> int:
        """How many whole batches an epoch has."""
        return self.num_images // self.batch_size

    def epoch(self, step: int) -> int:
        """Return the epoch that global step `step` belongs to, both from 0."""
        return step // self.steps_per_epoch

    def indices(self, step: int) -> NDArray[np.int64]:
        """Return the sample indices, int64 [rank_batch], that this rank takes in global step `step`."""
        epoch, position = divmod(step, self.steps_per_epoch)
        rank_batch = self.batch_size // self.world_size
        start = position * self.batch_size + self.rank * rank_batch
        if not self.is_random:
            return np.arange(start, start + rank_batch, dtype=np.int64)
        return self._permutation(epoch)[start : start + rank_batch]

    def _permutation(self, epoch: int) -> NDArray[np.int64]:
        order = self._cache.get(epoch)
        if order is None:
            order = permutation(self.seed, epoch, self.num_images)
            for old in sorted(self._cache)[:-1]:  # two epochs, for threads at a boundary: 10 M samples are 80 MB
                self._cache.pop(old, None)
            self._cache[epoch] = order
        return order


@dataclass(frozen=True)
class EvalShard:
    """A rank's part of an evaluation: consecutive samples, every sample in exactly one rank, nothing padded.

    `num_images` samples are evaluated. They are all there are, or as many of the `of` samples of a larger split, drawn
    once and for all: the same ones for any recipe, seed and number of ranks.
    """

    num_images: int
    batch: int
    rank: int = 0
    world_size: int = 1
    of: int | None = None

    def __post_init__(self) -> None:
        assert self.of is None or self.of >= self.num_images, f"{self.num_images} of {self.of} samples"

    @property
    def bounds(self) -> tuple[int, int]:
        """The number of this rank's first sample and the one after its last, among those evaluated."""
        return (
            self.rank * self.num_images // self.world_size,
            (self.rank + 1) * self.num_images // self.world_size,
        )

    @property
    def num_batches(self) -> int:
        """How many batches this rank evaluates; it may differ between ranks, and be 0."""
        first, stop = self.bounds
        return -(-(stop - first) // self.batch)

    def indices(self, number: int) -> NDArray[np.int64]:
        """Return the sample indices, int64 [<= batch], of batch `number`."""
        first, stop = self.bounds
        start = first + number * self.batch
        stop = min(start + self.batch, stop)
        if self.of is None or self.of == self.num_images:
            return np.arange(start, stop, dtype=np.int64)
        return self._drawn[start:stop]

    @cached_property
    def _drawn(self) -> NDArray[np.int64]:
        """Return int64 [num_images], in rising order, which reads files in theirs."""
        assert self.of is not None
        return np.sort(permutation(_SUBSET_SEED, 0, self.of)[: self.num_images])
