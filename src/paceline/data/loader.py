"""Batches, in exact order: a pure function of (seed, step, world), whoever makes them and wherever a run starts."""

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader

from paceline.core.dataset import Source
from paceline.core.errors import PacelineError
from paceline.core.process import die_with_parent
from paceline.data.augment import Augment, build_augments, split_augments
from paceline.data.draws import draw
from paceline.data.mix import Mixing, build_mixing
from paceline.data.reader import Reader, build_reader
from paceline.data.sampler import EvalShard, TrainOrder
from paceline.data.sizing import build_eval_sizing, build_train_sizing
from paceline.recipe.schema.data import Data

_PREFETCH = 2


Sizes = Callable[[int], int]
"""From a global step to the height and width in pixels of its images, such as `Plan.train_size`."""


@dataclass(frozen=True)
class Batch:
    """A rank's images of one step: uint8 [N, C, H, W], labels int64 [N], sample indices int64 [N].

    `draws`, float64 [N, D], are for what is still to be done to the images on the device (`data.finish`).
    """

    images: Tensor
    labels: Tensor
    indices: NDArray[np.int64]
    draws: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def pin_memory(self) -> "Batch":
        """Return the batch in page-locked memory; DataLoader calls this for a GPU."""
        return Batch(self.images.pin_memory(), self.labels.pin_memory(), self.indices, self.draws.pin_memory())

    def split(self, parts: int) -> list["Batch"]:
        """Return the batch as `parts` micro-batches of equal size, in order."""
        if parts == 1:
            return [self]
        images, labels, draws = self.images.chunk(parts), self.labels.chunk(parts), self.draws.chunk(parts)
        indices = np.split(self.indices, parts)
        return [Batch(*micro) for micro in zip(images, labels, indices, draws, strict=True)]


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

    def __getitem__(self, step: int) -> Batch:
        indices = self.order.indices(step)
        draws = draw(self.order.seed, self.order.epoch(step), indices, self._is_alternating)
        used = self.reader.num_draws
        images, labels = self.reader.read(indices, draws[:, :used], self.sizes(step))
        for augment in self.augments:
            images = augment(images, torch.from_numpy(draws[:, used : used + augment.num_draws]))
            used += augment.num_draws
        mixing = draws.shape[1] - self.mix.num_draws
        rest = np.concatenate([draws[:, used:mixing], self.mix.prepare(draws[:, mixing:])], axis=1)
        return Batch(images, labels, indices, torch.from_numpy(rest))

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

    def __getitem__(self, number: int) -> Batch:
        indices = self.shard.indices(number)
        nothing = np.empty((len(indices), 0))
        images, labels = self.reader.read(indices, nothing, self.image_size)
        return Batch(images, labels, indices, torch.from_numpy(nothing))


@dataclass(frozen=True)
class LoaderOptions:
    """How batches are made: in how many worker processes, and in page-locked memory or not.

    With `on_device` training batches are left to a `build_finish` with the same `on_device` to change, as far as a
    device can.
    """

    workers: int
    pin_memory: bool
    on_device: bool = False


class Loader(Protocol):
    """Yield the batches numbered `first` to `stop` - 1, in order."""

    def batches(self, first: int, stop: int) -> Iterator[Batch]:
        """Return an iterator over the batches; it may work ahead."""
        ...


@dataclass(frozen=True)
class InlineLoader:
    """Make each batch when it is asked for, in this process."""

    dataset: TrainBatches | EvalBatches
    pin_memory: bool

    def batches(self, first: int, stop: int) -> Iterator[Batch]:
        """Return an iterator over the batches."""
        made = (self.dataset[number] for number in range(first, stop))
        return (batch.pin_memory() for batch in made) if self.pin_memory else made


@dataclass(frozen=True)
class WorkerLoader:
    """Make batches ahead in worker processes, each batch whole in one of them."""

    dataset: TrainBatches | EvalBatches
    workers: int
    pin_memory: bool

    def batches(self, first: int, stop: int) -> Iterator[Batch]:
        """Return an iterator over the batches; the workers end with it."""
        loader: DataLoader[Any] = DataLoader(
            _Carried(self.dataset),  # type: ignore[arg-type]
            batch_size=None,
            sampler=range(first, stop),
            num_workers=min(self.workers, max(1, stop - first)),
            prefetch_factor=_PREFETCH,
            pin_memory=self.pin_memory,
            multiprocessing_context="fork",  # a worker is tied to this process by its parent's id
            worker_init_fn=partial(_start_worker, os.getpid()),
        )
        for item in loader:
            if isinstance(item, PacelineError):
                raise item
            yield item


@dataclass(frozen=True)
class _Carried:
    """Carry a user's error out of a worker as a value: DataLoader would wrap it in the worker's traceback."""

    dataset: TrainBatches | EvalBatches

    def __getitem__(self, number: int) -> Batch | PacelineError:
        try:
            return self.dataset[number]
        except PacelineError as error:
            return error


def _start_worker(parent: int, worker: int) -> None:
    """Tie a worker to its rank: it ends with it, and leaves signals meant for the run to it."""
    die_with_parent(parent)
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(ignored, signal.SIG_IGN)


def build_train_loader(data: Data, source: Source, order: TrainOrder, sizes: Sizes, options: LoaderOptions) -> Loader:
    """Return the loader whose batch number s is this rank's part of global step s, of `sizes(s)` pixels squared."""
    augments = build_augments(data.augment, source.info.mean if data.mean == "auto" else data.mean)
    here, deferred = split_augments(augments, on_device=options.on_device)
    mix = build_mixing(data.augment, source.info.num_classes)
    reader = build_reader(source, build_train_sizing(data))
    return _build(TrainBatches(order, reader, sizes, here, deferred, mix), options)


def build_eval_loader(data: Data, source: Source, shard: EvalShard, image_size: int, options: LoaderOptions) -> Loader:
    """Return the loader of a rank's shard of an evaluation, of images of `image_size` pixels squared."""
    return _build(EvalBatches(shard, build_reader(source, build_eval_sizing(data)), image_size), options)


def _build(dataset: TrainBatches | EvalBatches, options: LoaderOptions) -> Loader:
    if options.workers:
        return WorkerLoader(dataset, options.workers, options.pin_memory)
    return InlineLoader(dataset, options.pin_memory)
