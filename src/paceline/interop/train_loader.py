"""Training split for other training loops: one epoch per iteration, in exact order, finished on the device."""

from collections.abc import Iterator, Mapping
from typing import Any, Self

from torch import Tensor

from paceline.core.errors import CheckpointError
from paceline.core.results import LoaderResult
from paceline.interop.dataset import Dataset
from paceline.interop.pipeline import SplitPipeline
from paceline.interop.shared import SharedResources
from paceline.recipe.plan import Plan


class TrainLoader:
    """Yield (images, targets) of this rank's part of each batch, one epoch per iteration.

    `images` are float [N, C, H, W], normalised, or uint8 on request. `targets` are labels, int64 [N], or with mixup or
    cutmix float [N, num_classes] whose rows sum to 1. Both are on the device. N is `batch_size`, the rank's part of
    `data.batch_size`. The incomplete last batch of an epoch is dropped; it holds different images every time.

    Images and augmentation depend on (recipe's seed, epoch, image) alone: each batch equals the one of the same step of
    `paceline train`. Each iteration is the next epoch, wherever the previous one stopped; creating an iterator changes
    nothing until its first batch. Batches are prefetched, across the end of an epoch too.

    With `data.on_bad_image` skip, a bad image is left out with a warning, and too many raise `DataError`.
    """

    def __init__(self, *, pipeline: SplitPipeline, plan: Plan, seed: int, shared: SharedResources) -> None:
        self._pipeline = pipeline
        self._plan = plan
        self._seed = seed
        self._shared: SharedResources | None = shared
        self._step = 0  # the global step of the next batch
        self._start = 0  # that of the first batch of the next iteration

    def __len__(self) -> int:
        """Return the number of batches per epoch."""
        return self._plan.steps_per_epoch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches of the next epoch, or the rest of the epoch of a loaded state."""
        first = self._start
        self._start = (first // len(self) + 1) * len(self)
        for step in range(first, self._start):
            batch = self._pipeline.prefetcher.get(step)
            self._step = step + 1
            self._pipeline.warn_bad_images(batch)
            yield self._pipeline.to_device(batch)

    @property
    def batch_size(self) -> int:
        """Images per batch on this rank: `data.batch_size` over the number of ranks."""
        return self._plan.rank_batch

    @property
    def dataset(self) -> Dataset:
        """Metadata of the split: `classes`, `num_images`, ..."""
        return self._pipeline.dataset

    @property
    def epoch(self) -> int:
        """Epoch of the next iteration, from 0."""
        return self._start // len(self)

    @property
    def sampler(self) -> Self:
        """The loader itself, for trainers that call `set_epoch` of the sampler."""
        return self

    @property
    def batch_sampler(self) -> Self:
        """The loader itself, likewise."""
        return self

    @property
    def mixup_enabled(self) -> bool:
        """Whether targets are soft, by mixup or cutmix in `data.augment`; read-only."""
        return self._pipeline.finish.mix.num_draws > 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, from 0; a loaded state within that epoch keeps its position.

        The rest of an epoch that was stopped early is discarded, in `state_dict` too.
        """
        if epoch != self.epoch:
            self._start = epoch * len(self)
        self._step = self._start

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch yielded; the same on every rank.

        A state within an epoch resumes with the rest of it. To end the epoch there, call `set_epoch(loader.epoch)`
        first.
        """
        return {"step": self._step, **self._order}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume after the last batch of `state`, also within an epoch and with another number of ranks.

        Raise `CheckpointError` for a state of another seed, batch size or number of images, and for an invalid one.
        """
        for name, value in self._order.items():
            if state.get(name) != value:
                raise CheckpointError(
                    f"loader: the state has {name} {state.get(name)}, but this loader {value} (use the recipe "
                    f"that it was saved with)"
                )
        step = state.get("step")
        if not isinstance(step, int) or step < 0:
            raise CheckpointError(
                f"loader: the state has step {step!r} (load the return value of a loader's state_dict)"
            )
        self._start = self._step = step

    def stats(self) -> LoaderResult | None:
        """Return loader timings so far, waiting time included; None with `measure.clock` off."""
        return self._pipeline.loader.stats()

    def close(self) -> None:
        """Stop prefetching, and release what is shared with the other split's loader."""
        self._pipeline.close()
        self._shared = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _order(self) -> dict[str, int]:
        """Inputs that determine the order of images, besides the step."""
        return {"seed": self._seed, "batch_size": self._plan.batch_size, "num_images": self._plan.train_images}
