"""The training split as other loops take it: an epoch an iteration, in exact order, finished on the device."""

from collections.abc import Iterator, Mapping
from typing import Any, Self

from torch import Tensor

from paceline.core.errors import CheckpointError
from paceline.core.results import LoaderResult
from paceline.interop.dataset import Dataset
from paceline.interop.pipeline import Pipeline
from paceline.interop.shared import Shared
from paceline.recipe.plan import Plan


class TrainLoader:
    """Yield (images, targets) of this rank's part of each batch, an epoch an iteration.

    `images` are float [N, C, H, W], normalised, or uint8 where that was asked for; `targets` are labels, int64 [N], or
    with mixup or cutmix float [N, num_classes] whose rows sum to 1. Both are on the device that was asked for. N is
    `batch_size`, the rank's: `data.batch_size` counts all ranks. What does not fill a batch at the end of an epoch is
    left out, other images every time.

    Images and their augmentation depend on (recipe's seed, epoch, image) alone: a batch is the one that `paceline
    train` trains on in the same step. Each iteration is the next epoch, wherever the one before was left; asking for an
    iterator changes nothing until a batch is asked of it. Batches are made ahead, also across the end of an epoch.

    A bad image, where `data.on_bad_image` is skip, is a warning, and `DataError` when they are too many.
    """

    def __init__(self, *, pipeline: Pipeline, plan: Plan, seed: int, shared: Shared) -> None:
        self._pipeline = pipeline
        self._plan = plan
        self._seed = seed
        self._shared: Shared | None = shared
        self._step = 0  # the global step of the next batch
        self._start = 0  # that of the first batch of the next iteration

    def __len__(self) -> int:
        """How many batches an epoch has."""
        return self._plan.steps_per_epoch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches of the next epoch, or what is left of the one that a loaded state is in."""
        first = self._start
        self._start = (first // len(self) + 1) * len(self)
        for step in range(first, self._start):
            batch = self._pipeline.ahead.take(step)
            self._step = step + 1
            self._pipeline.note_bad(batch)
            yield self._pipeline.finished(batch)

    @property
    def batch_size(self) -> int:
        """Images of a batch on this rank: `data.batch_size` over the number of ranks."""
        return self._plan.rank_batch

    @property
    def dataset(self) -> Dataset:
        """Facts of the split: `classes`, `num_images`, ..."""
        return self._pipeline.facts

    @property
    def epoch(self) -> int:
        """The epoch, from 0, that the next iteration is of."""
        return self._start // len(self)

    @property
    def sampler(self) -> Self:
        """What trainers call `set_epoch` of: the loader, which is its own."""
        return self

    @property
    def batch_sampler(self) -> Self:
        """The same."""
        return self

    @property
    def mixup_enabled(self) -> bool:
        """Whether targets are soft, by mixup or cutmix in `data.augment`; it cannot be set."""
        return self._pipeline.finish.mix.num_draws > 0

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch`, from 0, the next iteration's; a loaded state that is in that epoch stays where it is.

        What is left of an epoch that was left early is given up by it, in `state_dict` too.
        """
        if epoch != self.epoch:
            self._start = epoch * len(self)
        self._step = self._start

    def state_dict(self) -> dict[str, Any]:
        """Return where in training this is, behind the last batch that was handed out; the same on every rank.

        Of an epoch that was left early it goes on with the rest, as after a stop. Where that is to be the end of the
        epoch, call `set_epoch(loader.epoch)` before.
        """
        return {"step": self._step, **self._order}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on behind the last batch of `state`, which may be in an epoch, and of another number of ranks.

        Raise `CheckpointError` where its batches were others: of another seed, batch size or number of images; and for
        what is no such state.
        """
        for name, value in self._order.items():
            if state.get(name) != value:
                raise CheckpointError(
                    f"loader: the state is of {name} {state.get(name)}, and this loader's is {value} (use the recipe "
                    f"that it was saved with)"
                )
        step = state.get("step")
        if not isinstance(step, int) or step < 0:
            raise CheckpointError(f"loader: the state has step {step!r} (load what a loader's state_dict has returned)")
        self._start = self._step = step

    def stats(self) -> LoaderResult | None:
        """Return how the batches so far were made, and how long they were waited for; None with `measure.clock` off."""
        return self._pipeline.loader.stats()

    def close(self) -> None:
        """End whoever makes batches ahead, and let go of what is shared with the other split's loader."""
        self._pipeline.close()
        self._shared = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _order(self) -> dict[str, int]:
        """What the order of images is a function of, beside the step."""
        return {"seed": self._seed, "batch_size": self._plan.batch_size, "num_images": self._plan.train_images}
