"""Batches, in exact order: a pure function of (seed, step, world), whoever makes them and wherever a run starts."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing import active_children
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader

from paceline.core.dataset import Source
from paceline.core.errors import PacelineError
from paceline.core.results import LoaderResult
from paceline.core.units import Duration
from paceline.data.augment import Augment, build_augments, split_augments
from paceline.data.bad import BadImage as BadImage
from paceline.data.bad import build_instead
from paceline.data.draws import draw
from paceline.data.laps import Laps, Work, build_laps
from paceline.data.mix import Mixing, build_mixing
from paceline.data.reader import Reader, build_reader
from paceline.data.sampler import EvalShard, TrainOrder
from paceline.data.sizing import build_eval_sizing, build_train_sizing
from paceline.data.tally import Tally, build_tally
from paceline.data.workers import POLL_S, Crew, Trail, enter_crew, has_entered, own_child_signals, traced
from paceline.recipe.schema.data import Data

PREFETCH = 2
"""Batches that each worker makes ahead."""
BORN_S = 10.0
"""How long workers have to begin: a hundred times what they take."""
_BIRTHS = 4


Sizes = Callable[[int], int]
"""From a global step to the height and width in pixels of its images, such as `Plan.train_size`."""


@dataclass(frozen=True)
class Batch:
    """A rank's images of one step: uint8 [N, C, H, W], labels int64 [N], sample indices int64 [N].

    `draws`, float64 [N, D], are for what is still to be done to the images on the device (`data.finish`). `bad` are
    the samples met that could not be read. In training others stand in for them, under the indices that were asked
    for; in evaluation they are left out, so N may be 0.
    """

    images: Tensor
    labels: Tensor
    indices: NDArray[np.int64]
    draws: Tensor
    bad: tuple[BadImage, ...] = ()

    def __len__(self) -> int:
        return len(self.labels)

    def pin_memory(self) -> "Batch":
        """Return the batch in page-locked memory; DataLoader calls this for a GPU."""
        images, labels, draws = self.images.pin_memory(), self.labels.pin_memory(), self.draws.pin_memory()
        return Batch(images, labels, self.indices, draws, self.bad)

    def split(self, parts: int) -> list["Batch"]:
        """Return the batch as `parts` micro-batches of equal size, in order; `bad` goes with the first."""
        if parts == 1:
            return [self]
        images, labels, draws = self.images.chunk(parts), self.labels.chunk(parts), self.draws.chunk(parts)
        indices = np.split(self.indices, parts)
        bad = (self.bad, *((),) * (parts - 1))
        return [Batch(*micro) for micro in zip(images, labels, indices, draws, bad, strict=True)]


@dataclass(frozen=True)
class TrainBatches:
    """The batch of each global step, by draws keyed by (seed, epoch, sample index).

    `augments` are applied here; the draws of the `deferred` ones, and of mixing, go along in the batch.
    """

    order: TrainOrder
    reader: Reader
    sizes: Sizes
    augments: tuple[Augment, ...]
    deferred: tuple[Augment, ...]
    mix: Mixing
    laps: Laps

    def __getitem__(self, step: int) -> Batch:
        indices = self.order.indices(step)
        self.laps.lap("collate")
        draws = draw(self.order.seed, self.order.epoch(step), indices, self._is_alternating)
        self.laps.lap("augment")
        used = self.reader.num_draws
        read = self.reader.read(indices, draws[:, :used], self.sizes(step))
        images = read.images
        self.laps.lap("collate")
        for augment in self.augments:
            images = augment(images, torch.from_numpy(draws[:, used : used + augment.num_draws]))
            used += augment.num_draws
        mixing = draws.shape[1] - self.mix.num_draws
        rest = np.concatenate([draws[:, used:mixing], self.mix.prepare(draws[:, mixing:])], axis=1)
        self.laps.lap("augment")
        return Batch(images, read.labels, indices, torch.from_numpy(rest), read.bad)

    def title(self, step: int) -> str:
        """Return what a user would call the batch."""
        return f"the batch of step {step + 1:,}"

    @property
    def _is_alternating(self) -> list[bool]:
        """Return of each draw whether it alternates: first the reader's, then the augments', then those for mixing."""
        changes = (*self.augments, *self.deferred)
        augmenting = [augment.alternating for augment in changes for _ in range(augment.num_draws)]
        return [False] * self.reader.num_draws + augmenting + [False] * self.mix.num_draws


@dataclass(frozen=True)
class EvalBatches:
    """The batches of a rank's shard of an evaluation, never changed at random."""

    shard: EvalShard
    reader: Reader
    image_size: int
    laps: Laps

    def __getitem__(self, number: int) -> Batch:
        indices = self.shard.indices(number)
        nothing = np.empty((len(indices), 0))
        read = self.reader.read(indices, nothing, self.image_size)
        return Batch(read.images, read.labels, indices[read.kept], torch.from_numpy(nothing[read.kept]), read.bad)

    def title(self, number: int) -> str:
        """Return what a user would call the batch."""
        return f"evaluation batch {number + 1:,}"


class _Made(NamedTuple):
    """A batch, and what making it took. A tuple, so that DataLoader pins what is in it."""

    batch: Batch
    work: Work


@dataclass(frozen=True)
class LoaderOptions:
    """How batches are made: in how many worker processes, and in page-locked memory or not.

    With `on_device` training batches are left to a `build_finish` with the same `on_device` to change, as far as a
    device can. `now` is the clock, in seconds, that making them is timed by; without one it is not.
    """

    workers: int
    pin_memory: bool
    on_device: bool = False
    now: Callable[[], float] | None = None


class Loader(Protocol):
    """Yield the batches numbered `first` to `stop` - 1, in order."""

    def batches(self, first: int, stop: int) -> Iterator[Batch]:
        """Return an iterator over the batches; it may work ahead."""
        ...

    def stats(self) -> LoaderResult | None:
        """Return how all batches handed out so far, by any iterator, were made; None where that is not timed."""
        ...


@dataclass(frozen=True)
class InlineLoader:
    """Make each batch when it is asked for, in this process."""

    dataset: TrainBatches | EvalBatches
    pin_memory: bool
    tally: Tally

    def batches(self, first: int, stop: int) -> Iterator[Batch]:
        """Return an iterator over the batches."""
        for number in range(first, stop):
            self.tally.ask(num_ready=0)
            made = _make(self.dataset, number, pin_memory=self.pin_memory)
            self.tally.hand(made.work)
            yield made.batch

    def stats(self) -> LoaderResult | None:
        """Return how all batches handed out so far were made."""
        return self.tally.stats()


@dataclass(frozen=True)
class WorkerLoader:
    """Make batches ahead in worker processes, each batch whole in one of them.

    A worker that dies, or that no batch comes from for `timeout`, is a `WatchError` that names what it was at.
    """

    dataset: TrainBatches | EvalBatches
    workers: int
    pin_memory: bool
    timeout: Duration
    trail: Trail
    name_of: Callable[[int], str]
    tally: Tally

    def batches(self, first: int, stop: int) -> Iterator[Batch]:
        """Return an iterator over the batches; the workers end with it."""
        ahead, workers = self._start(first, stop)
        with Crew(workers, self.trail, self.timeout, self.dataset.title, self.name_of) as crew:
            try:
                for number in range(first, stop):
                    self.tally.ask(self.trail.num_made - (number - first))
                    item = crew.wait_for(number, ahead)
                    if isinstance(item, PacelineError):
                        raise item
                    self.tally.hand(item.work)
                    yield item.batch
            finally:
                del ahead  # DataLoader tells its workers to end; the crew ends one that hangs

    def stats(self) -> LoaderResult | None:
        """Return how all batches handed out so far were made."""
        return self.tally.stats()

    def _start(self, first: int, stop: int) -> tuple[Iterator[Any], list[BaseProcess]]:
        """Start workers; where one does not come to life, end them and start others.

        A process that is forked from one with threads can find a lock closed that nobody will open any more: CPython
        3.11 takes one of its own before it runs a line of Python (`_PyThreadState_DeleteExcept`). It is rare.
        """
        for _ in range(_BIRTHS):
            self.trail.clear()
            self.tally.start(self._num_workers(first, stop))
            others = set(active_children())
            with own_child_signals():
                ahead = iter(self._loader(first, stop))
            workers = [child for child in active_children() if child not in others]
            if has_entered(workers, self.trail, BORN_S):
                break
            for worker in workers:
                worker.kill()
                worker.join()
        return ahead, workers

    def _num_workers(self, first: int, stop: int) -> int:
        return min(self.workers, max(1, stop - first))

    def _loader(self, first: int, stop: int) -> "DataLoader[Any]":
        return DataLoader(
            _Carried(self.dataset, self.trail),  # type: ignore[arg-type]
            batch_size=None,
            sampler=range(first, stop),
            num_workers=self._num_workers(first, stop),
            prefetch_factor=PREFETCH,
            pin_memory=self.pin_memory,
            timeout=POLL_S,
            multiprocessing_context="fork",  # a worker is tied to this process by its parent's id
            worker_init_fn=partial(enter_crew, os.getpid(), self.trail),
        )


@dataclass(frozen=True)
class _Carried:
    """Carry batches out of a worker, and a user's error as a value: DataLoader would wrap it in a traceback."""

    dataset: TrainBatches | EvalBatches
    trail: Trail

    def __getitem__(self, number: int) -> _Made | PacelineError:
        self.trail.batch(number)
        try:
            made = _make(self.dataset, number, pin_memory=False)  # that is for a process with a device
        except PacelineError as error:
            return error
        self.trail.made()
        return made


def _make(dataset: TrainBatches | EvalBatches, number: int, *, pin_memory: bool) -> _Made:
    dataset.laps.begin()
    batch = dataset[number]
    if pin_memory:
        batch = batch.pin_memory()
    return _Made(batch, dataset.laps.finish(len(batch), batch.images.nbytes))


def build_train_loader(data: Data, source: Source, order: TrainOrder, sizes: Sizes, options: LoaderOptions) -> Loader:
    """Return the loader whose batch number s is this rank's part of global step s, of `sizes(s)` pixels squared."""
    augments = build_augments(data.augment, source.info.mean if data.mean == "auto" else data.mean)
    here, deferred = split_augments(augments, on_device=options.on_device)
    mix = build_mixing(data.augment, source.info.num_classes)
    trail = Trail(max(1, options.workers))
    laps = build_laps(options.now)
    reader = build_reader(traced(source, trail), build_train_sizing(data), build_instead(data, "train"), laps)
    batches = TrainBatches(order, reader, sizes, here, deferred, mix, laps)
    return _build(batches, options, data.worker_timeout, trail, source)


def build_eval_loader(data: Data, source: Source, shard: EvalShard, image_size: int, options: LoaderOptions) -> Loader:
    """Return the loader of a rank's shard of an evaluation, of images of `image_size` pixels squared."""
    trail = Trail(max(1, options.workers))
    laps = build_laps(options.now)
    reader = build_reader(traced(source, trail), build_eval_sizing(data), build_instead(data, "eval"), laps)
    return _build(EvalBatches(shard, reader, image_size, laps), options, data.worker_timeout, trail, source)


def _build(
    dataset: TrainBatches | EvalBatches, options: LoaderOptions, timeout: Duration, trail: Trail, source: Source
) -> Loader:
    tally = build_tally(options.now, options.workers)
    if options.workers:
        return WorkerLoader(dataset, options.workers, options.pin_memory, timeout, trail, source.name_of, tally)
    return InlineLoader(dataset, options.pin_memory, tally)
