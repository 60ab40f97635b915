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
from paceline.data.augment.geometry import Flip
from paceline.data.augment.move import Move, fuse
from paceline.data.augment.protocol import Augment, Change
from paceline.data.bad import Instead, build_instead
from paceline.data.batch import Batch
from paceline.data.batches import Batches
from paceline.data.device_loader import DeviceLoader, reside
from paceline.data.inline import InlineLoader
from paceline.data.laps import Laps, build_laps
from paceline.data.mix import build_mixing
from paceline.data.native import native
from paceline.data.native_loader import Finisher, NativeLoader
from paceline.data.native_plan import Planner
from paceline.data.nvjpeg import DecodedReader, OnDevice, build_decoder
from paceline.data.pack.reader import PackSource
from paceline.data.pixels import ResidentPixels, build_pixels
from paceline.data.processes import WorkerLoader
from paceline.data.reader import ArrayReader, MovedReader, PictureReader
from paceline.data.sampler import EvalShard, TrainOrder
from paceline.data.schedule import EvalSchedule, Schedule, Sizes, TrainSchedule
from paceline.data.sizing import RandomResizedCrop, Sizing, build_eval_sizing, build_train_sizing
from paceline.data.slots import build_slots
from paceline.data.tally import LoaderName, Tally, build_tally
from paceline.data.threads import ThreadLoader
from paceline.data.workers import Trail, traced
from paceline.recipe.schema.data import Data

_CPU = torch.device("cpu")
# Steps whose draws are computed together if one process makes all batches: measured on CIFAR-10 at batch 512.
_AT_ONCE = 16


@dataclass(frozen=True)
class LoaderOptions:
    """How batches are made: the loader, its number of workers, and page-locked memory or not.

    Without workers the main process makes them, whatever `loader` says. `device` is where the loader `device` keeps the
    data. With `on_device`, training batches need a `build_finish` with the same `on_device`, for the augmentation that
    a device can do. `now` is the clock for timing, in seconds; None disables timing.
    """

    workers: int
    pin_memory: bool
    on_device: bool = False
    now: Callable[[], float] | None = None
    loader: LoaderName = "processes"
    device: torch.device = _CPU

    @property
    def maker(self) -> LoaderName:
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


def build_train_loader(data: Data, source: Source, order: TrainOrder, sizes: Sizes, options: LoaderOptions) -> Loader:
    """Build the training loader: batch s is this rank's share of global step s, `sizes(s)` pixels squared."""
    augments = build_augments(data.augment, source.info.mean if data.mean == "auto" else data.mean)
    host_augments, _ = split_augments(augments, on_device=options.on_device)
    mix = build_mixing(data.augment, source.info.num_classes)
    sizing = build_train_sizing(data)
    # The order of a sample's draws: resizing, augmentation, mixing.
    augmenting = [augment.alternating for augment in augments for _ in range(augment.num_draws)]
    is_alternating = (*([False] * sizing.num_draws), *augmenting, *([False] * mix.num_draws))
    at_once = 1 if options.maker in ("nvjpeg", "threads", "processes") else _AT_ONCE
    schedule = TrainSchedule(order, sizes, is_alternating, mix.num_draws, mix.prepare, at_once)
    instead = build_instead(data, "train")
    return _Making(source, schedule, sizing, instead, host_augments, data.worker_timeout, options).loader()


def build_eval_loader(data: Data, source: Source, shard: EvalShard, image_size: int, options: LoaderOptions) -> Loader:
    """Build the loader of a rank's shard of an evaluation; images are `image_size` pixels squared."""
    schedule, sizing = EvalSchedule(shard, image_size), build_eval_sizing(data)
    return _Making(source, schedule, sizing, build_instead(data, "eval"), (), data.worker_timeout, options).loader()


@dataclass(frozen=True)
class _Making:
    source: Source
    schedule: Schedule
    sizing: Sizing
    instead: Instead
    augments: tuple[Augment, ...]
    timeout: Duration
    options: LoaderOptions

    def loader(self) -> Loader:
        options = self.options
        match options.maker:
            # On a CPU the inline loader holds the data in memory as well.
            case "device" if options.device.type != "cpu":
                assert isinstance(self.source, ArraySource), "`choose_loader` admits only pixels"
                resident = reside(self.source, options.device)
                return DeviceLoader(resident, self.schedule, self.augments, self._tally, build_laps(options.now))
            case "native":
                return self._native()
            case "threads":
                return self._threads(partial(self._members, changes=fuse(self.augments, native())))
            case "nvjpeg":
                return self._threads(self._decoding)
            case "processes":
                return self._processes()
        (dataset,) = self._members([Trail(1)], fuse(self.augments, native()))
        return InlineLoader(dataset, options.pin_memory, self._tally)

    def _processes(self) -> WorkerLoader:
        workers, progress = self.options.workers, Trail(self.options.workers)
        (dataset,) = self._members([progress], fuse(self.augments, native()))
        name_of = self.source.name_of
        return WorkerLoader(dataset, workers, self.options.pin_memory, self.timeout, progress, name_of, self._tally)

    def _threads(self, members: Callable[[Sequence[Trail]], list[Batches]]) -> ThreadLoader:
        workers, progress = self.options.workers, Trail(self.options.workers)
        return ThreadLoader(
            members([progress.of(worker) for worker in range(workers)]),
            pin_memory=self.options.pin_memory,
            timeout=self.timeout,
            trail=progress,
            name_of=self.source.name_of,
            tally=self._tally,
        )

    def _native(self) -> NativeLoader:
        """Build the native loader, which applies a leading `Flip` while decoding."""
        core, workers, progress = native(), self.options.workers, Trail(self.options.workers + 1)
        assert core is not None and isinstance(self.source, PackSource), "`choose_loader` admits only packs"
        flip = self.augments[0] if self.augments and isinstance(self.augments[0], Flip) else None
        changes = fuse(self.augments[flip is not None :], core)
        planner = Planner(self.source, self.schedule, self.sizing, flip)
        members = self._members([progress.of(worker) for worker in range(workers + 1)], changes)
        pin_memory = self.options.pin_memory
        return NativeLoader(
            planner,
            [Finisher(member, self.source.labels, planner.num_draws, pin_memory) for member in members],
            partial(core.Pool, workers),
            build_slots(pin_memory=pin_memory and not changes),
            timeout=self.timeout,
            trail=progress,
            tally=self._tally,
            laps=build_laps(self.options.now),
        )

    def _members(self, progress_by_worker: Sequence[Trail], changes: tuple[Change, ...]) -> list[Batches]:
        """Build one batch maker per worker, each with its own progress record; data in memory is shared."""
        workers = [(progress, build_laps(self.options.now)) for progress in progress_by_worker]
        if isinstance(self.source, ArraySource) and not isinstance(self.sizing, RandomResizedCrop):
            return self._gathering(self.source, [timer for _, timer in workers], changes)
        readers = (
            (PictureReader(traced(self.source, progress), self.sizing, self.instead, timer), timer)
            for progress, timer in workers
        )
        return [Batches(self.schedule, reader, changes, timer) for reader, timer in readers]

    def _decoding(self, progress_by_worker: Sequence[Trail]) -> list[Batches]:
        """Build one batch maker per thread that decodes, resizes and augments on the device."""
        device, members = self.options.device, []
        decoder = build_decoder(device, self.source.info.channels)
        changes = tuple(OnDevice(augment, device) for augment in self.augments)
        for progress in progress_by_worker:
            source, timer = traced(self.source, progress), build_laps(self.options.now)
            host = PictureReader(source, self.sizing, self.instead, timer)
            reader = DecodedReader(host, source, self.sizing, decoder, timer)
            members.append(Batches(self.schedule, reader, changes, timer))
        return members

    def _gathering(self, source: ArraySource, timers: Sequence[Laps], changes: tuple[Change, ...]) -> list[Batches]:
        """Build one batch maker per timer for pixels of one size, with crop and flip fused into the gather."""
        pixels = build_pixels(source)
        if isinstance(pixels, ResidentPixels) and changes and isinstance(changes[0], Move):
            moved = ((MovedReader(pixels, source.labels, changes[0], timer), timer) for timer in timers)
            return [Batches(self.schedule, reader, changes[1:], timer) for reader, timer in moved]
        readers = ((ArrayReader(pixels, source.labels, timer), timer) for timer in timers)
        return [Batches(self.schedule, reader, changes, timer) for reader, timer in readers]

    @property
    def _tally(self) -> Tally:
        maker = self.options.maker
        workers = 0 if maker in ("inline", "device") else self.options.workers
        return build_tally(self.options.now, workers, maker)
