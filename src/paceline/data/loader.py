"""Loaders of batches, in exact order: a function of (seed, step, world), whoever makes them and wherever a run starts.

Which loader suits a data set is decided in `data.choice`.
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
_AT_ONCE = 16
"""Steps whose draws are drawn together where one process makes all batches: measured on CIFAR-10 at batch 512."""


@dataclass(frozen=True)
class LoaderOptions:
    """How batches are made: by whom, with how many workers, and in page-locked memory or not.

    Without workers it is the rank itself, whatever `loader` says; `device` is where loader `device` keeps the set. With
    `on_device` training batches are left to a `build_finish` with the same `on_device` to change, as far as a device
    can. `now` is the clock, in seconds, that making them is timed by; without one it is not.
    """

    workers: int
    pin_memory: bool
    on_device: bool = False
    now: Callable[[], float] | None = None
    loader: LoaderName = "processes"
    device: torch.device = _CPU

    @property
    def maker(self) -> LoaderName:
        """Who makes batches in the end."""
        return self.loader if self.workers or self.loader == "device" else "inline"


class Loader(Protocol):
    """Yield the batches numbered `first` to `stop` - 1, in order."""

    def batches(self, first: int, stop: int) -> Iterator[Batch]:
        """Return an iterator over the batches; it may work ahead."""
        ...

    def stats(self) -> LoaderResult | None:
        """Return how all batches handed out so far, by any iterator, were made; None where that is not timed."""
        ...

    def close(self) -> None:
        """End whoever works ahead; what has been handed out stays, and another iterator starts others."""
        ...


def build_train_loader(data: Data, source: Source, order: TrainOrder, sizes: Sizes, options: LoaderOptions) -> Loader:
    """Return the loader whose batch number s is this rank's part of global step s, of `sizes(s)` pixels squared."""
    augments = build_augments(data.augment, source.info.mean if data.mean == "auto" else data.mean)
    here, deferred = split_augments(augments, on_device=options.on_device)
    mix = build_mixing(data.augment, source.info.num_classes)
    sizing = build_train_sizing(data)
    augmenting = [augment.alternating for augment in (*here, *deferred) for _ in range(augment.num_draws)]
    is_alternating = (*([False] * sizing.num_draws), *augmenting, *([False] * mix.num_draws))
    at_once = 1 if options.maker in ("nvjpeg", "threads", "processes") else _AT_ONCE
    schedule = TrainSchedule(order, sizes, is_alternating, mix.num_draws, mix.prepare, at_once)
    return _Making(source, schedule, sizing, build_instead(data, "train"), here, data.worker_timeout, options).loader()


def build_eval_loader(data: Data, source: Source, shard: EvalShard, image_size: int, options: LoaderOptions) -> Loader:
    """Return the loader of a rank's shard of an evaluation, of images of `image_size` pixels squared."""
    schedule, sizing = EvalSchedule(shard, image_size), build_eval_sizing(data)
    return _Making(source, schedule, sizing, build_instead(data, "eval"), (), data.worker_timeout, options).loader()


@dataclass(frozen=True)
class _Making:
    """What batches are made of and by whom."""

    source: Source
    schedule: Schedule
    sizing: Sizing
    instead: Instead
    augments: tuple[Augment, ...]
    timeout: Duration
    options: LoaderOptions

    def loader(self) -> Loader:
        """Return what makes them."""
        options = self.options
        match options.maker:
            case "device" if options.device.type != "cpu":  # there inline has the set in memory as well, and moves it
                assert isinstance(self.source, ArraySource), "the choice of a loader lets only pixels through"
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
        (alone,) = self._members([Trail(1)], fuse(self.augments, native()))
        return InlineLoader(alone, options.pin_memory, self._tally)

    def _processes(self) -> WorkerLoader:
        workers, trail = self.options.workers, Trail(self.options.workers)
        (dataset,) = self._members([trail], fuse(self.augments, native()))
        name_of = self.source.name_of
        return WorkerLoader(dataset, workers, self.options.pin_memory, self.timeout, trail, name_of, self._tally)

    def _threads(self, members: Callable[[Sequence[Trail]], list[Batches]]) -> ThreadLoader:
        workers, trail = self.options.workers, Trail(self.options.workers)
        return ThreadLoader(
            members([trail.of(worker) for worker in range(workers)]),
            pin_memory=self.options.pin_memory,
            timeout=self.timeout,
            trail=trail,
            name_of=self.source.name_of,
            tally=self._tally,
        )

    def _native(self) -> NativeLoader:
        """Return the native loader; mirroring, where it comes first, is done while decoding."""
        core, workers, trail = native(), self.options.workers, Trail(self.options.workers + 1)
        assert core is not None and isinstance(self.source, PackSource), (
            "the choice of a loader lets only packs through"
        )
        flip = self.augments[0] if self.augments and isinstance(self.augments[0], Flip) else None
        changes = fuse(self.augments[flip is not None :], core)
        planner = Planner(self.source, self.schedule, self.sizing, flip)
        members = self._members([trail.of(worker) for worker in range(workers + 1)], changes)
        pin_memory = self.options.pin_memory
        return NativeLoader(
            planner,
            [Finisher(member, self.source.labels, planner.num_draws, pin_memory) for member in members],
            partial(core.Pool, workers),
            build_slots(pin_memory=pin_memory and not changes),
            timeout=self.timeout,
            trail=trail,
            tally=self._tally,
            laps=build_laps(self.options.now),
        )

    def _members(self, trails: Sequence[Trail], changes: tuple[Change, ...]) -> list[Batches]:
        """Return what each of some workers makes batches with, noting in its trail; they share what is in memory."""
        each = [(trail, build_laps(self.options.now)) for trail in trails]
        if isinstance(self.source, ArraySource) and not isinstance(self.sizing, RandomResizedCrop):
            return self._gathering(self.source, [laps for _, laps in each], changes)
        readers = (
            (PictureReader(traced(self.source, own), self.sizing, self.instead, laps), laps) for own, laps in each
        )
        return [Batches(self.schedule, reader, changes, laps) for reader, laps in readers]

    def _decoding(self, trails: Sequence[Trail]) -> list[Batches]:
        """Return the same for photographs that are decoded, sized and changed on the device."""
        device, members = self.options.device, []
        decoder = build_decoder(device, self.source.info.channels)
        changes = tuple(OnDevice(augment, device) for augment in self.augments)
        for own in trails:
            source, laps = traced(self.source, own), build_laps(self.options.now)
            host = PictureReader(source, self.sizing, self.instead, laps)
            reader = DecodedReader(host, source, self.sizing, decoder, laps)
            members.append(Batches(self.schedule, reader, changes, laps))
        return members

    def _gathering(self, source: ArraySource, each: Sequence[Laps], changes: tuple[Change, ...]) -> list[Batches]:
        """Return the same for images that are pixels of one size, and are moved while they are gathered."""
        pixels = build_pixels(source)
        if isinstance(pixels, ResidentPixels) and changes and isinstance(changes[0], Move):
            moved = ((MovedReader(pixels, source.labels, changes[0], laps), laps) for laps in each)
            return [Batches(self.schedule, reader, changes[1:], laps) for reader, laps in moved]
        readers = ((ArrayReader(pixels, source.labels, laps), laps) for laps in each)
        return [Batches(self.schedule, reader, changes, laps) for reader, laps in readers]

    @property
    def _tally(self) -> Tally:
        maker = self.options.maker
        workers = 0 if maker in ("inline", "device") else self.options.workers
        return build_tally(self.options.now, workers, maker)
