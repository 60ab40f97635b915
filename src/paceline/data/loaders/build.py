"""Build loaders that yield batches in exact order: a function of seed, step and world size, for any loader.

`choose_loader` decides which loader suits a data set.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from paceline.core.dataset import ArraySource, Source
from paceline.core.results import LoaderResult
from paceline.core.units import Duration
from paceline.data.augment.build import build_augments, split_augments
from paceline.data.augment.geometric import Augment, BatchFlip, Change, FusedCropFlip, fuse_crop_flip
from paceline.data.augment.mixup import build_mixer
from paceline.data.bad_images import BadImagePolicy, build_bad_image_policy
from paceline.data.batch import Batch
from paceline.data.loaders.batch_maker import BatchMaker, InlineLoader
from paceline.data.loaders.device import DeviceLoader, load_split_to_device
from paceline.data.loaders.native import BatchFinisher, BatchPlanner, NativeLoader, build_host_buffers
from paceline.data.loaders.nvjpeg import DeviceAugment, DeviceDecodeReader, build_jpeg_decoder
from paceline.data.loaders.process import ProcessLoader
from paceline.data.loaders.reader import (
    ArrayReader,
    CropFlipArrayReader,
    ImageReader,
    TensorImageStore,
    build_image_store,
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
from paceline.data.timing import BatchTimer, LoaderName, LoaderStats, build_batch_timer, build_loader_stats
from paceline.data.workers import WorkerProgress, track_source
from paceline.recipe.schema.data import Data

_CPU = torch.device("cpu")
# Steps whose draws are computed together if one process makes all batches: measured on CIFAR-10 at batch 512.
_STEPS_PER_DRAW = 16


@dataclass(frozen=True)
class LoaderOptions:
    """Options of making batches: the loader, its number of workers, and whether to use page-locked memory.

    Without workers the main process makes them, whatever `loader` is. `device` is where the loader `device` keeps the
    data. With `on_device`, training batches need a `build_device_transforms` with the same `on_device`, for the
    augmentation that a device can do. `clock` is the clock for timing, in seconds; None disables timing.
    """

    workers: int
    pin_memory: bool
    on_device: bool = False
    clock: Callable[[], float] | None = None
    loader: LoaderName = "processes"
    device: torch.device = _CPU

    @property
    def effective_loader(self) -> LoaderName:
        """The loader that makes batches in the end."""
        return self.loader if self.workers or self.loader == "device" else "inline"


class Loader(Protocol):
    """Yield the batches numbered `first` to `stop` - 1, in order."""

    def batches(self, first: int, stop: int) -> Iterator[Batch]:
        """Return an iterator over the batches; it may prefetch."""
        ...

    def stats(self) -> LoaderResult | None:
        """Return the timing of all batches handed out so far, by any iterator, or None without timing."""
        ...

    def close(self) -> None:
        """End workers and threads; batches handed out stay valid, and a new iterator starts new workers."""
        ...


def build_train_loader(
    data: Data, source: Source, order: TrainOrder, sizes: ImageSizeAtStep, options: LoaderOptions
) -> Loader:
    """Build the training loader: batch s is this rank's share of global step s, `sizes(s)` pixels squared."""
    augments = build_augments(data.augment, source.info.mean if data.mean == "auto" else data.mean)
    host_augments, _ = split_augments(augments, on_device=options.on_device)
    mix = build_mixer(data.augment, source.info.num_classes)
    resizer = build_train_resizer(data)
    # The order of a sample's draws: resizing, augmentation, mixing.
    augmenting = [augment.alternating for augment in augments for _ in range(augment.num_draws)]
    is_alternating = (*([False] * resizer.num_draws), *augmenting, *([False] * mix.num_draws))
    steps_per_draw = 1 if options.effective_loader in ("nvjpeg", "threads", "processes") else _STEPS_PER_DRAW
    schedule = TrainBatchSchedule(order, sizes, is_alternating, mix.num_draws, mix.prepare, steps_per_draw)
    policy = build_bad_image_policy(data, "train")
    return _LoaderBuilder(source, schedule, resizer, policy, host_augments, data.worker_timeout, options).build()


def build_eval_loader(data: Data, source: Source, shard: EvalShard, image_size: int, options: LoaderOptions) -> Loader:
    """Build the loader of a rank's shard of an evaluation; images are `image_size` pixels squared."""
    schedule, resizer = EvalBatchSchedule(shard, image_size), build_eval_resizer(data)
    return _LoaderBuilder(
        source, schedule, resizer, build_bad_image_policy(data, "eval"), (), data.worker_timeout, options
    ).build()


@dataclass(frozen=True)
class _LoaderBuilder:
    source: Source
    schedule: BatchSchedule
    resizer: Resizer
    bad_image_policy: BadImagePolicy
    augments: tuple[Augment, ...]
    timeout: Duration
    options: LoaderOptions

    def build(self) -> Loader:
        options = self.options
        match options.effective_loader:
            # On a CPU the inline loader holds the data in memory as well.
            case "device" if options.device.type != "cpu":
                assert isinstance(self.source, ArraySource), "`choose_loader` admits only pixels"
                resident = load_split_to_device(self.source, options.device)
                return DeviceLoader(
                    resident, self.schedule, self.augments, self._loader_stats, build_batch_timer(options.clock)
                )
            case "native":
                return self._build_native_loader()
            case "threads":
                return self._build_thread_loader(
                    partial(self._build_batch_makers, changes=fuse_crop_flip(self.augments, load_native()))
                )
            case "nvjpeg":
                return self._build_thread_loader(self._build_nvjpeg_batch_makers)
            case "processes":
                return self._build_process_loader()
        (batch_maker,) = self._build_batch_makers([WorkerProgress(1)], fuse_crop_flip(self.augments, load_native()))
        return InlineLoader(batch_maker, options.pin_memory, self._loader_stats)

    def _build_process_loader(self) -> ProcessLoader:
        workers, progress = self.options.workers, WorkerProgress(self.options.workers)
        (batch_maker,) = self._build_batch_makers([progress], fuse_crop_flip(self.augments, load_native()))
        name_of = self.source.name_of
        return ProcessLoader(
            batch_maker, workers, self.options.pin_memory, self.timeout, progress, name_of, self._loader_stats
        )

    def _build_thread_loader(
        self, batch_makers: Callable[[Sequence[WorkerProgress]], list[BatchMaker]]
    ) -> ThreadLoader:
        workers, progress = self.options.workers, WorkerProgress(self.options.workers)
        return ThreadLoader(
            batch_makers([progress.for_worker(worker) for worker in range(workers)]),
            pin_memory=self.options.pin_memory,
            timeout=self.timeout,
            progress=progress,
            name_of=self.source.name_of,
            loader_stats=self._loader_stats,
        )

    def _build_native_loader(self) -> NativeLoader:
        """Build the native loader, which applies a leading `BatchFlip` while decoding."""
        core, workers, progress = load_native(), self.options.workers, WorkerProgress(self.options.workers + 1)
        assert core is not None and isinstance(self.source, PackSource), "`choose_loader` admits only packs"
        flip = self.augments[0] if self.augments and isinstance(self.augments[0], BatchFlip) else None
        changes = fuse_crop_flip(self.augments[flip is not None :], core)
        planner = BatchPlanner(self.source, self.schedule, self.resizer, flip)
        batch_makers = self._build_batch_makers([progress.for_worker(worker) for worker in range(workers + 1)], changes)
        pin_memory = self.options.pin_memory
        return NativeLoader(
            planner,
            [BatchFinisher(member, self.source.labels, planner.num_draws, pin_memory) for member in batch_makers],
            partial(core.Pool, workers),
            build_host_buffers(pin_memory=pin_memory and not changes),
            timeout=self.timeout,
            progress=progress,
            loader_stats=self._loader_stats,
            timer=build_batch_timer(self.options.clock),
        )

    def _build_batch_makers(
        self, progress_by_worker: Sequence[WorkerProgress], changes: tuple[Change, ...]
    ) -> list[BatchMaker]:
        """Build one batch maker per worker, each with its own progress record; data in memory is shared."""
        workers = [(progress, build_batch_timer(self.options.clock)) for progress in progress_by_worker]
        if isinstance(self.source, ArraySource) and not isinstance(self.resizer, RandomCropResizer):
            return self._build_array_batch_makers(self.source, [timer for _, timer in workers], changes)
        readers = (
            (ImageReader(track_source(self.source, progress), self.resizer, self.bad_image_policy, timer), timer)
            for progress, timer in workers
        )
        return [BatchMaker(self.schedule, reader, changes, timer) for reader, timer in readers]

    def _build_nvjpeg_batch_makers(self, progress_by_worker: Sequence[WorkerProgress]) -> list[BatchMaker]:
        """Build one batch maker per thread that decodes, resizes and augments on the device."""
        device, batch_makers = self.options.device, []
        decoder = build_jpeg_decoder(device, self.source.info.channels)
        changes = tuple(DeviceAugment(augment, device) for augment in self.augments)
        for progress in progress_by_worker:
            source, timer = track_source(self.source, progress), build_batch_timer(self.options.clock)
            host = ImageReader(source, self.resizer, self.bad_image_policy, timer)
            reader = DeviceDecodeReader(host, source, self.resizer, decoder, timer)
            batch_makers.append(BatchMaker(self.schedule, reader, changes, timer))
        return batch_makers

    def _build_array_batch_makers(
        self, source: ArraySource, timers: Sequence[BatchTimer], changes: tuple[Change, ...]
    ) -> list[BatchMaker]:
        """Build one batch maker per timer for pixels of one size, with crop and flip fused into the gather."""
        pixels = build_image_store(source)
        if isinstance(pixels, TensorImageStore) and changes and isinstance(changes[0], FusedCropFlip):
            moved = ((CropFlipArrayReader(pixels, source.labels, changes[0], timer), timer) for timer in timers)
            return [BatchMaker(self.schedule, reader, changes[1:], timer) for reader, timer in moved]
        readers = ((ArrayReader(pixels, source.labels, timer), timer) for timer in timers)
        return [BatchMaker(self.schedule, reader, changes, timer) for reader, timer in readers]

    @property
    def _loader_stats(self) -> LoaderStats:
        loader = self.options.effective_loader
        workers = 0 if loader in ("inline", "device") else self.options.workers
        return build_loader_stats(self.options.clock, workers, loader)
