"""Loaders for other training loops: iterables of (images, targets) on the device."""

import atexit
import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor

from paceline.core.results import LoaderResult
from paceline.data.augment.build import DeviceTransforms
from paceline.data.batch import Batch
from paceline.data.loaders.build import Loader
from paceline.data.transfer import DeviceTransfer
from paceline.interop.position import Position
from paceline.recipe.plan import Plan
from paceline.training.coordinator import SplitBadImages


class Prefetcher:
    """Get batches of `loader` by number, up to `stop`; consecutive numbers are prefetched, and any other restarts
    it.
    """

    def __init__(self, loader: Loader, stop: int) -> None:
        self._loader = loader
        self._stop = stop
        self._batches: Iterator[Batch] = iter(())
        self._next = -1

    def get(self, number: int) -> Batch:
        """Return batch `number`."""
        if number != self._next:
            self._batches = self._loader.batches(number, self._stop)
        self._next = -1  # if the iterator raises, the next call restarts prefetching
        batch = next(self._batches)
        self._next = number + 1
        return batch

    def close(self) -> None:
        """Stop the prefetching workers; the next batch starts them again."""
        self._batches, self._next = iter(()), -1


@dataclass(frozen=True)
class Dataset:
    """Metadata of a split. It holds no images.

    `num_images` counts the whole split, over all ranks. `image_size` is the height and width of finished images in
    pixels (for training images, at the end of `data.progressive`). `mean` and `std` are per channel, of pixels in [0,
    1]: those of the training images for both splits. A label is an index into `classes`.
    """

    classes: tuple[str, ...]
    num_images: int
    channels: int
    image_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __len__(self) -> int:
        """Return the number of images of the split, over all ranks."""
        return self.num_images

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.classes)

    @property
    def class_to_idx(self) -> dict[str, int]:
        """Label of each class, by its name."""
        return {name: label for label, name in enumerate(self.classes)}


class SharedResources:
    """Keep `resources` open until no loader refers to this object, or the program exits."""

    def __init__(self, resources: ExitStack) -> None:
        # Registered last, so called first: multiprocessing's own handler would wait for workers that were not stopped.
        atexit.register(weakref.finalize(self, resources.close))


@dataclass(frozen=True)
class SplitPipeline:
    """Components that produce a split's batches, in order of use, and the split's metadata `dataset`."""

    loader: Loader
    prefetcher: Prefetcher
    bad_images: SplitBadImages
    transfer: DeviceTransfer
    finish: DeviceTransforms
    dataset: Dataset

    def warn_bad_images(self, batch: Batch) -> None:
        """Warn of the bad images of a batch. Raise `DataError` for too many so far."""
        if batch.bad:
            self.bad_images.add(batch.bad)
            self.bad_images.sync()

    def to_device(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return (images, targets) on the device, ready for a training loop."""
        return self.finish(self.transfer(batch))

    def close(self) -> None:
        """Stop the workers."""
        self.prefetcher.close()
        self.loader.close()


class _SplitLoader:
    """Loader of one split."""

    def __init__(self, pipeline: SplitPipeline, shared: SharedResources) -> None:
        self._pipeline = pipeline
        self._shared: SharedResources | None = shared

    @property
    def dataset(self) -> Dataset:
        """Metadata of the split: `classes`, `num_images`, ..."""
        return self._pipeline.dataset

    def close(self) -> None:
        """Stop prefetching, and release what is shared with the other split's loader."""
        self._pipeline.close()
        self._shared = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class TrainLoader(_SplitLoader):
    """Yield (images, targets) of this rank's part of each batch, one epoch per iteration.

    `images` are float [N, C, H, W], normalized, or uint8 on request. `targets` are labels, int64 [N], or with mixup,
    cutmix, several labels per image or soft labels float [N, num_classes]. Both are on the device. N is `batch_size`,
    the rank's part of `data.batch_size`. The incomplete last batch of an epoch is dropped.

    Images and augmentation depend on (recipe's seed, epoch, image) alone: each batch equals the one of the same step of
    `paceline train`. Each iteration is the next epoch, wherever the previous one stopped; creating an iterator changes
    nothing until its first batch. Prefetching continues across the end of an epoch.

    With `data.on_bad_image` skip, a bad image is left out with a warning, and too many raise `DataError`.
    """

    def __init__(self, *, pipeline: SplitPipeline, plan: Plan, seed: int, shared: SharedResources) -> None:
        super().__init__(pipeline, shared)
        self._plan = plan
        identity = {"seed": seed, "batch_size": plan.batch_size, "num_images": plan.train_images}
        self._position = Position(plan.steps_per_epoch, identity)

    def __len__(self) -> int:
        """Return the number of batches per epoch."""
        return self._plan.steps_per_epoch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches of the next epoch, or the rest of the epoch of a loaded state."""
        for step in self._position.iterate():
            batch = self._pipeline.prefetcher.get(step)
            self._position.step = step + 1
            self._pipeline.warn_bad_images(batch)
            yield self._pipeline.to_device(batch)

    @property
    def batch_size(self) -> int:
        """Images per batch on this rank: `data.batch_size` over the number of ranks."""
        return self._plan.rank_batch

    @property
    def epoch(self) -> int:
        """Epoch of the next iteration, from 0."""
        return self._position.epoch

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
        return self._pipeline.finish.mix is not None

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, from 0; a loaded state within that epoch keeps its position.

        The rest of an epoch that was stopped early is discarded.
        """
        self._position.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch yielded; the same on every rank.

        A state within an epoch resumes with the rest of it; to end the epoch there, first call
        `set_epoch(loader.epoch)`.
        """
        return self._position.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume after the last batch of `state`, with any number of ranks.

        Raise `CheckpointError` for a state of another seed, batch size or number of images, and for an invalid one.
        """
        self._position.load_state_dict(state)

    def stats(self) -> LoaderResult | None:
        """Return loader timings so far, waiting time included; None with `measure.clock` off."""
        return self._pipeline.loader.stats()


class EvalLoader(_SplitLoader):
    """Yield (images, labels) of this rank's share of the validation split, the same in every iteration.

    `images` are float [N, C, H, W], normalized, or uint8 on request, `labels` int64 [N], or with several labels per
    image or soft labels targets float32 [N, num_classes], both on the device. Every
    image is in exactly one batch of one rank, without padding or dropping: sum your counts over the ranks and divide by
    `dataset.num_images`. Batches have up to `batch_size` images. All ranks have the same number of batches, so that
    collectives in a loop do not hang, except with a `data.eval_batch_size` of 1, or fewer than two images on some rank.

    With `data.on_bad_image` skip, a bad image is left out with a warning, and possibly a batch with it.
    """

    def __init__(self, *, pipeline: SplitPipeline, num_batches: int, batch_size: int, shared: SharedResources) -> None:
        super().__init__(pipeline, shared)
        self._num_batches = num_batches
        self._batch_size = batch_size

    def __len__(self) -> int:
        """Return the number of batches on this rank."""
        return self._num_batches

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield all batches of this rank, in the order of the split."""
        try:
            for number in range(self._num_batches):
                batch = self._pipeline.prefetcher.get(number)
                self._pipeline.warn_bad_images(batch)
                if len(batch):
                    yield self._pipeline.to_device(batch)
        finally:
            self._pipeline.prefetcher.close()  # also if the loop breaks early

    @property
    def batch_size(self) -> int:
        """Maximum number of images per batch, on this rank."""
        return self._batch_size
