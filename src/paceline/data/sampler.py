"""Sample order: a pure function of seed, step, rank and world size."""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from paceline.core.philox import permutation

# Beyond the seeds of recipes, so that a subset is independent of any training order.
_SUBSET_SEED = 2**63


@dataclass(frozen=True)
class TrainOrder:
    """Exact training order: global step s takes one slice of its epoch's permutation.

    Rank r of W takes the r-th part of the slice. Samples that do not fill a batch at the end of an epoch are dropped.
    Without `is_random`, every epoch is 0, 1, 2, ..., and drops the same samples.
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
        """Number of full batches per epoch."""
        return self.num_images // self.batch_size

    def epoch(self, step: int) -> int:
        """Return the epoch of global step `step`, both counted from 0."""
        return step // self.steps_per_epoch

    def indices(self, step: int) -> NDArray[np.int64]:
        """Return this rank's sample indices of global step `step`, int64 [rank_batch]."""
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
            # Keep two epochs, for threads at a boundary: a permutation of 10 M samples takes 80 MB.
            for old in sorted(self._cache)[:-1]:
                self._cache.pop(old, None)
            self._cache[epoch] = order
        return order


@dataclass(frozen=True)
class EvalShard:
    """A rank's shard of an evaluation: consecutive samples, each sample in exactly one rank, without padding.

    `num_images` samples are evaluated: all of the split, or a fixed random subset of `split_size` samples, the same for any
    recipe, seed and number of ranks.
    """

    num_images: int
    batch_size: int
    rank: int = 0
    world_size: int = 1
    split_size: int | None = None

    def __post_init__(self) -> None:
        assert self.split_size is None or self.split_size >= self.num_images, (
            f"{self.num_images} of {self.split_size} samples"
        )

    @property
    def bounds(self) -> tuple[int, int]:
        """Positions of this rank's first sample and one past its last, among the evaluated samples."""
        return (
            self.rank * self.num_images // self.world_size,
            (self.rank + 1) * self.num_images // self.world_size,
        )

    @property
    def num_batches(self) -> int:
        """Number of batches of this rank; it may differ between ranks, and be 0."""
        first, stop = self.bounds
        return -(-(stop - first) // self.batch_size)

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
