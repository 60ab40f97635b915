"""The samples, draws and image size of every batch. Torch-free."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.data.draws import draw_uniform
from paceline.data.sampler import EvalShard, TrainOrder

# From a global step to the height and width of its images in pixels, such as `Plan.train_size`.
ImageSizeAtStep = Callable[[int], int]

# From a batch's uniform mixing draws to the draws that mixing on a device needs, see `Mixer.prepare`.
PrepareMixDraws = Callable[[NDArray[np.float64]], NDArray[np.float64]]


class BatchSchedule(Protocol):
    """Samples, draws and image size of each batch."""

    def indices(self, number: int) -> NDArray[np.int64]:
        """Return the sample indices, int64 [N]."""
        ...

    def draws(self, number: int) -> NDArray[np.float64]:
        """Return the draws, float64 [N, D], read-only, in order of use: resizing, augmentation, mixing."""
        ...

    def size(self, number: int) -> int:
        """Return the height and width of the images in pixels."""
        ...

    def describe(self, number: int) -> str:
        """Describe the batch for messages."""
        ...


@dataclass(frozen=True)
class TrainBatchSchedule:
    """The batch of each global step, with draws keyed by (seed, epoch, sample index).

    `is_alternating` has one entry per draw. `prepare` converts the last `num_mix_draws` draws.
    """

    order: TrainOrder
    size_at_step: ImageSizeAtStep
    is_alternating: Sequence[bool]
    num_mix_draws: int
    prepare: PrepareMixDraws
    # Draw for several steps together: for small batches the fixed cost of numpy calls dominates.
    steps_per_draw: int = 1
    _drawn: dict[int, NDArray[np.float64]] = field(default_factory=dict, repr=False, compare=False)

    def indices(self, number: int) -> NDArray[np.int64]:
        """Return this rank's sample indices of a global step, int64 [rank_batch]."""
        return self.order.indices(number)

    def draws(self, number: int) -> NDArray[np.float64]:
        """Return the draws, float64 [rank_batch, D]."""
        if self.steps_per_draw == 1:
            return self._draw_steps(number, number + 1)[0]
        if number not in self._drawn:
            self._drawn.clear()
            epoch = self.order.epoch(number)
            stop = min(number + self.steps_per_draw, (epoch + 1) * self.order.steps_per_epoch)
            self._drawn.update(zip(range(number, stop), self._draw_steps(number, stop), strict=True))
        return self._drawn[number]

    def size(self, number: int) -> int:
        """Return the height and width of a global step's images in pixels."""
        return self.size_at_step(number)

    def describe(self, number: int) -> str:
        """Describe the batch for messages."""
        return f"the batch of step {number + 1:,}"

    def _draw_steps(self, first: int, stop: int) -> list[NDArray[np.float64]]:
        indices = np.concatenate([self.order.indices(step) for step in range(first, stop)])
        draws = draw_uniform(self.order.seed, self.order.epoch(first), indices, self.is_alternating)
        steps = np.split(draws, stop - first)
        for step in steps if self.num_mix_draws else ():
            step[:, -self.num_mix_draws :] = self.prepare(step[:, -self.num_mix_draws :])
        return steps


@dataclass(frozen=True)
class EvalBatchSchedule:
    """The batches of a rank's shard of an evaluation, without random draws."""

    shard: EvalShard
    image_size: int

    def indices(self, number: int) -> NDArray[np.int64]:
        """Return the sample indices, int64 [N]."""
        return self.shard.indices(number)

    def draws(self, number: int) -> NDArray[np.float64]:
        """Return float64 [N, 0]."""
        return np.empty((len(self.shard.indices(number)), 0))

    def size(self, number: int) -> int:
        """Return the height and width of all images in pixels."""
        return self.image_size

    def describe(self, number: int) -> str:
        """Describe the batch for messages."""
        return f"evaluation batch {number + 1:,}"
