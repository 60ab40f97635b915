"""Build loaders that yield batches in exact order: the same batches for any loader and number of workers.

`choose_loader` decides which loader suits a dataset.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from paceline.core.dataset import ArraySource, Source, has_one_size
from paceline.core.results import LoaderResult
from paceline.core.units import Duration
from paceline.data.augment.build import build_augments, split_augments
from paceline.data.augment.geometric import Augment, BatchFlip, Change, FusedCropFlip, fuse_crop_flip
from paceline.data.augment.mixup import build_mixer
from paceline.data.bad_images import BadImagePolicy, build_bad_image_policy
from paceline.data.batch import Batch
from paceline.data.loaders.batch_maker import BatchMaker, InlineLoader
from paceline.data.loaders.device import DeviceLoader, load_split_to_device
from paceline.data.loaders.jpeg_index import build_index_cache
from paceline.data.loaders.native import BatchFinisher, NativeLoader, PageableBuffers, allocate_pinned
from paceline.data.loaders.native_files import FileImages
from paceline.data.loaders.native_plan import BatchPlanner, NativeImages, PackImages
from paceline.data.loaders.process import ProcessLoader
from paceline.data.loaders.reader import (
    ArrayReader,
    ImageReader,
    load_images,
)
from paceline.data.loaders.thread import ThreadLoader
from paceline.data.native import load_native
from paceline.data.order import (
    BatchSchedule,
    EvalBatchSchedule,
    EvalShard,
    ImageSizeAtStep,
    TrainBatchSchedule,
    TrainOrder,
)
from paceline.data.pack.reader import PackSource
from paceline.data.resize import RandomCropResizer, Resizer, build_eval_resizer, build_train_resizer
from paceline.data.sources.fingerprint import get_labels
from paceline.data.sources.subset import find_file_source
from paceline.data.timing import BatchTimer, LoaderName, LoaderStats
from paceline.data.workers import WorkerProgress, track_source
from paceline.recipe.schema.data import Data

_CPU = torch.device("cpu")
# Steps whose draws are computed together: measured on CIFAR-10 at batch 512.
_STEPS_PER_DRAW = 16
# Batches that are replayed: several, so that the device's caches do not hold all the data.
NUM_REPLAYED_BATCHES = 4


def drop_warning(message: str) -> None:
    """Drop a warning."""


@dataclass(frozen=True)
class LoaderOptions:
    """How to make batches: the loader, the number of its workers, and whether to use page-locked memory."""

    workers: int
    pin_memory: bool
    # Leave the augmentation that a device can do to a `build_device_transforms` with the same `on_device`.
    on_device: bool = False
    clock: Callable[[], float] | None = None  # returns seconds; None disables timing
    loader: LoaderName = "processes"
    device: torch.device = _CPU  # for the loaders `device` and `nvjpeg`
    warn: Callable[[str], None] = drop_warning  # gets a line about what fails without ending the run

    @property
    def effective_loader(self) -> LoaderName:
        """`loader`, or `inline` without workers."""
        return self.loader if self.workers or self.loader == "device" else "inline"


class Loader(Protocol):
    """Yield the batches numbered `first` to `stop` - 1, in order."""

    def batches(self, first: int, stop: int) -> Iterator[Batch]:
        """Return an iterator over the batches; it may prefetch."""
        ...

    def stats(self) -> LoaderResult | None:
        """Return the timing of all batches delivered so far, by any iterator, or None without timing."""
        ...

    def close(self) -> None:
        """End workers and threads; delivered batches stay valid, and a new iterator starts new workers."""
        ...


def build_train_loader(
    data: Data,
    source: Source,
    order: TrainOrder,
    size_at_step: ImageSizeAtStep,
    options: LoaderOptions,
    to_steps: Callable[[Duration], int] | None = None,
) -> Loader:
    """Build the training loader: batch s is this rank's part of global step s, `size_at_step(s)` pixels squared.

    `to_steps` converts durations to steps; without it, mixup and cutmix do not end.
    """
    mean = source.info.mean if data.mean == "auto" else data.mean
    augments = build_augments(data.augment, mean, source.info.pixels)
    host_augments, _ = split_augments(augments, on_device=options.on_device)
    mix = build_mixer(data.augment, source.info.num_classes, to_steps)
    resizer = build_train_resizer(data, are_one_size=has_one_size(source))
    # The order of a sample's draws: resizing, augmentation, mixing.
    augmenting = [augment.alternating for augment in augments for _ in range(augment.num_draws)]
    num_mix_draws = mix.num_draws if mix else 0
    is_alternating = (*([False] * resizer.num_draws), *augmenting, *([False] * num_mix_draws))
    # With several workers, each makes only some of the batches.
    steps_per_draw = 1 if options.effective_loader in ("nvjpeg", "threads", "processes") else _STEPS_PER_DRAW
    prepare = mix.prepare if mix else None
    schedule = TrainBatchSchedule(order, size_at_step, is_alternating, num_mix_draws, prepare, steps_per_draw)
    policy = build_bad_image_policy(data, "train")
    return _LoaderBuilder(source, schedule, resizer, policy, host_augments, data, options).build()


def build_eval_loader(data: Data, source: Source, shard: EvalShard, image_size: int, options: LoaderOptions) -> Loader:
    """Build the loader of a rank's part of an evaluation; images are `image_size` pixels squared."""
    schedule = EvalBatchSchedule(shard, image_size)
    resizer = build_eval_resizer(data, are_one_size=has_one_size(source))
    policy = build_bad_image_policy(data, "eval")
    # A sampler of training images may change between two iterators (`data.sampler=hard`), but this schedule does not.
    return _LoaderBuilder(source, schedule, resizer, policy, (), data, options, keeps_workers=True).build()


@dataclass(frozen=True)
class _LoaderBuilder:
    source: Source
    schedule: BatchSchedule
    resizer: Resizer
    bad_image_policy: BadImagePolicy
    augments: tuple[Augment, ...]
    data: Data
    options: LoaderOptions
    keeps_workers: bool = False

    def build(self) -> Loader:
        options = self.options
        match options.effective_loader:
            # On a CPU the inline loader holds the data in memory as well.
            case "device" if options.device.type != "cpu":
                assert isinstance(self.source, ArraySource), "`choose_loader` admits only pixels"
                resident = load_split_to_device(self.source, options.device)
                stats, timer = self._loader_stats, BatchTimer(options.clock)
                return DeviceLoader(resident, self.schedule, self.augments, stats, timer, self.resizer.interpolation)
            case "native":
                return self._build_native_loader()
            case "threads":
                return self._build_thread_loader(partial(self._build_batch_makers, changes=self._fused_augments))
            case "nvjpeg":
                from paceline.contrib.nvjpeg import build_nvjpeg

                make_reader, changes = build_nvjpeg(options.device, self.source.info.channels, self.augments)
                return self._build_thread_loader(
                    partial(self._build_batch_makers, changes=changes, make_reader=make_reader)
                )
            case "processes":
                return self._build_process_loader()
        (batch_maker,) = self._build_batch_makers([WorkerProgress(1)], self._fused_augments)
        return InlineLoader(batch_maker, options.pin_memory, self._loader_stats)

    @property
    def _fused_augments(self) -> tuple[Change, ...]:
        # The extension moves 8-bit pixels.
        return fuse_crop_flip(self.augments, None if self.source.info.pixel_format.is_wide else load_native())

    def _build_process_loader(self) -> ProcessLoader:
        workers, progress = self.options.workers, WorkerProgress(self.options.workers)
        (batch_maker,) = self._build_batch_makers([progress], self._fused_augments)
        return ProcessLoader(
            batch_maker,
            workers,
            keeps_workers=self.keeps_workers,
            pin_memory=self.options.pin_memory,
            timeout=self.data.worker_timeout,
            progress=progress,
            name_of=self.source.name_of,
            loader_stats=self._loader_stats,
        )

    def _build_thread_loader(
        self, batch_makers: Callable[[Sequence[WorkerProgress]], list[BatchMaker]]
    ) -> ThreadLoader:
        workers, progress = self.options.workers, WorkerProgress(self.options.workers)
        return ThreadLoader(
            batch_makers([progress.for_worker(worker) for worker in range(workers)]),
            pin_memory=self.options.pin_memory,
            timeout=self.data.worker_timeout,
            progress=progress,
            name_of=self.source.name_of,
            loader_stats=self._loader_stats,
        )

    def _build_native_loader(self) -> NativeLoader:
        # One worker more: the main thread finishes the batches that need no Python per image.
        extension, workers, progress = load_native(), self.options.workers, WorkerProgress(self.options.workers + 1)
        assert extension is not None, "`choose_loader` checks it"
        # A leading flip is applied while decoding.
        flip = self.augments[0] if self.augments and isinstance(self.augments[0], BatchFlip) else None
        augments = fuse_crop_flip(self.augments[flip is not None :], extension)
        planner = BatchPlanner(self._build_native_images(), self.schedule, self.resizer, flip)
        labels = get_labels(self.source)
        assert labels is not None, "`choose_loader` admits only sources that have them"
        batch_makers = self._build_batch_makers(
            [progress.for_worker(worker) for worker in range(workers + 1)], augments
        )
        pin_memory = self.options.pin_memory
        return NativeLoader(
            planner,
            [BatchFinisher(each, labels, planner.num_draws, pin_memory) for each in batch_makers],
            partial(extension.Pool, workers),
            # Augmentation writes new tensors, and only those are pinned.
            allocate_pinned if pin_memory and not augments else PageableBuffers().allocate,
            timeout=self.data.worker_timeout,
            progress=progress,
            loader_stats=self._loader_stats,
            timer=BatchTimer(self.options.clock),
        )

    def _build_native_images(self) -> NativeImages:
        if isinstance(self.source, PackSource):
            return PackImages(self.source)
        source = find_file_source(self.source)
        assert source is not None, "`choose_loader` admits only packs and files"
        indexes = build_index_cache(self.data, source.file_root, self.options.warn)
        return FileImages(source, indexes, self.data.worker_timeout)

    def _build_batch_makers(
        self,
        progress_by_worker: Sequence[WorkerProgress],
        changes: tuple[Change, ...],
        make_reader: Callable[..., ImageReader] = ImageReader,
    ) -> list[BatchMaker]:
        # One per worker; data in memory is shared.
        workers = [(progress, BatchTimer(self.options.clock)) for progress in progress_by_worker]
        if isinstance(self.source, ArraySource) and not isinstance(self.resizer, RandomCropResizer):
            return self._build_array_batch_makers(self.source, [timer for _, timer in workers], changes)
        readers = (
            (make_reader(track_source(self.source, progress), self.resizer, self.bad_image_policy, timer), timer)
            for progress, timer in workers
        )
        return [BatchMaker(self.schedule, reader, changes, timer) for reader, timer in readers]

    def _build_array_batch_makers(
        self, source: ArraySource, timers: Sequence[BatchTimer], changes: tuple[Change, ...]
    ) -> list[BatchMaker]:
        images, crop_flip = load_images(source), None
        if isinstance(images, Tensor) and changes and isinstance(changes[0], FusedCropFlip):
            # Gather, crop and flip in a single pass over memory.
            crop_flip, changes = changes[0], changes[1:]
        mode = self.resizer.interpolation
        readers = ((ArrayReader(images, source.labels, crop_flip, timer, mode), timer) for timer in timers)
        return [BatchMaker(self.schedule, reader, changes, timer) for reader, timer in readers]

    @property
    def _loader_stats(self) -> LoaderStats:
        loader = self.options.effective_loader
        workers = 0 if loader in ("inline", "device") else self.options.workers
        return LoaderStats(self.options.clock, workers, loader)


@dataclass(frozen=True)
class ReplayLoader:
    """Yield the first `num_batches` batches of `loader` repeatedly, each as `store` returns it.

    They must not be modified in place. It measures training without the cost of loading: the weights of such a run are
    meaningless, with progressive resizing all steps have the first image sizes, and augmentation on the device runs on
    every repetition.
    """

    loader: Loader
    num_batches: int
    store: Callable[[Batch], Batch] | None = None  # None keeps it

    def batches(self, first: int, stop: int) -> Iterator[Batch]:
        """Return an iterator over `stop - first` batches, repeating those from number `first` on."""
        made = self.loader.batches(first, min(stop, first + self.num_batches))
        stored = [self.store(batch) if self.store else batch for batch in made]
        self.loader.close()  # before the first batch, so that no worker runs beside the measured steps
        yield from stored
        # Report bad samples once.
        repeated = [replace(batch, bad=()) for batch in stored]
        for number in range(first + len(stored), stop):
            yield repeated[(number - first) % len(repeated)]

    def stats(self) -> LoaderResult | None:
        """Return the timing of making the batches, each counted once."""
        return self.loader.stats()

    def close(self) -> None:
        """End the workers of `loader`."""
        self.loader.close()
