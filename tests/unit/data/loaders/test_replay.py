"""Replayed batches repeat the first ones, and no others are made."""

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import active_children

import numpy as np
import pytest
import torch

from paceline.core.dataset import ArraySource, DatasetInfo, Sample
from paceline.core.errors import DataError
from paceline.data.augment.build import build_device_transforms
from paceline.data.batch import Batch
from paceline.data.loaders.build import NUM_REPLAYED_BATCHES, Loader, LoaderOptions, ReplayLoader, build_train_loader
from paceline.data.order import TrainOrder
from paceline.data.transfer import DeviceTransfer
from paceline.recipe.schema.data import Data

INFO = DatasetInfo("made", "train", 50, ("a", "b"), 3, (16, 16), (0.5,) * 3, (0.25,) * 3)
ORDER = TrainOrder(seed=1, num_images=50, batch_size=10)
MIX = Data(augment=("pad_crop", "flip", "rotate", "cutout", "random_erasing", "mixup", "cutmix"))  # type: ignore[arg-type]


def source() -> ArraySource:
    images = np.random.default_rng(0).integers(0, 256, (50, 16, 16, 3), dtype=np.uint8)
    return ArraySource(INFO, images, np.arange(50, dtype=np.int64) % 2)


def loader_of(workers: int = 0, data: Data = MIX, *, on_device: bool = False) -> Loader:
    options = LoaderOptions(workers, pin_memory=False, on_device=on_device, clock=time.perf_counter)
    return build_train_loader(data, source(), ORDER, lambda step: 16 + step, options)


def same(one: Batch, other: Batch) -> bool:
    mine, its = ((each.images, each.labels, each.draws, torch.from_numpy(each.indices)) for each in (one, other))
    return all(torch.equal(a, b) for a, b in zip(mine, its, strict=True))


@pytest.mark.parametrize("workers", [0, 2])
def test_the_first_batches_repeat_with_their_sizes(workers: int) -> None:
    made = list(loader_of().batches(3, 7))
    replayed = list(ReplayLoader(loader_of(workers), 4).batches(3, 13))
    assert len(replayed) == 10
    assert all(same(batch, made[position % 4]) for position, batch in enumerate(replayed))


@pytest.mark.parametrize("num_steps", [0, 1, 4])
def test_fewer_steps_than_replays_make_no_more_batches(num_steps: int) -> None:
    loader = ReplayLoader(loader_of(), 4)
    assert len(list(loader.batches(2, 2 + num_steps))) == num_steps
    stats = loader.stats()
    assert stats is not None and stats.batches == num_steps


def test_workers_end_before_the_first_batch() -> None:
    before = set(active_children())
    replayed = ReplayLoader(loader_of(workers=2), NUM_REPLAYED_BATCHES).batches(0, 100)
    next(replayed)
    assert set(active_children()) <= before
    assert len(list(replayed)) == 99


def test_threads_end_before_the_first_batch() -> None:
    options = LoaderOptions(2, pin_memory=False, loader="threads")
    loader = build_train_loader(MIX, source(), ORDER, lambda step: 16, options)
    next(ReplayLoader(loader, NUM_REPLAYED_BATCHES).batches(0, 100))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("loader")]


def test_the_result_counts_each_made_batch_once() -> None:
    loader = ReplayLoader(loader_of(), 4)
    list(loader.batches(0, 10))
    stats = loader.stats()
    assert stats is not None and (stats.batches, stats.images) == (4, 40)


class Holed:
    """A source whose samples 7 and 8 cannot be read."""

    info = replace(INFO, image_size=None)

    def __len__(self) -> int:
        return 50

    def read(self, index: int) -> Sample:
        if index in (7, 8):
            raise DataError(f"made/{index}.jpg: cannot be decoded (remove it)")
        return np.zeros((16, 16, 3), np.uint8), 0

    def name_of(self, index: int) -> str:
        return f"made/{index}.jpg"


def test_bad_samples_are_reported_once() -> None:
    options = LoaderOptions(0, pin_memory=False)
    made = build_train_loader(Data(on_bad_image="skip"), Holed(), ORDER, lambda step: 16, options)
    bad_by_batch = [batch.bad for batch in ReplayLoader(made, 5).batches(0, 15)]
    assert {bad.index for row in bad_by_batch[:5] for bad in row} == {7, 8}
    assert bad_by_batch[5:] == [()] * 10


def on(device: str) -> DeviceTransfer:
    return DeviceTransfer(torch.device(device), torch.float32, INFO.mean, INFO.std, torch.channels_last)


def test_each_batch_is_copied_to_the_device_once() -> None:
    place, kept = on("meta"), []

    def keep(batch: Batch) -> Batch:
        kept.append(place.to_device(batch))
        return kept[-1]

    replayed: Iterator[Batch] = ReplayLoader(loader_of(), 4, keep).batches(0, 12)
    for position, batch in enumerate(replayed):
        placed = place(batch)
        assert placed.images.device.type == "meta"
        assert placed.images is kept[position % 4].images and placed.labels is kept[position % 4].labels
        assert batch.indices.tolist() == ORDER.indices(position % 4).tolist()
    assert len(kept) == 4


def test_a_step_does_not_modify_its_batch() -> None:
    """On a CPU nothing is copied, so an in-place change would show in the next replay."""
    place = on("cpu")
    finish = build_device_transforms(MIX, place, 2, on_device=True)
    replayed = ReplayLoader(loader_of(on_device=True), 2, place.to_device).batches(0, 4)
    steps = [finish(place(batch)) for batch in replayed]
    made = list(loader_of(on_device=True).batches(0, 2))
    for step, (images, targets) in enumerate(steps):
        again_images, again_targets = finish(place(made[step % 2]))
        assert torch.equal(images, again_images) and torch.equal(targets, again_targets)
