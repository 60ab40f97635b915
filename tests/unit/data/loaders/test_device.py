"""Data on the device gives the batches of any other loader. The device is the CPU (`tests/gpu` has another)."""

import time

import numpy as np
import pytest
import torch

from paceline.core.dataset import ArraySource, DatasetInfo
from paceline.data.augment.build import build_augments, split_augments
from paceline.data.augment.geometric import Augment
from paceline.data.batch import Batch
from paceline.data.loaders.batch_maker import InlineLoader
from paceline.data.loaders.build import LoaderOptions, build_eval_loader, build_train_loader
from paceline.data.loaders.device import DeviceLoader, load_split_to_device
from paceline.data.order import EvalShard, TrainOrder
from paceline.data.timing import BatchTimer, LoaderStats
from paceline.recipe.schema.data import Data

INFO = DatasetInfo("made", "train", 50, ("a", "b"), 3, (16, 16), (0.5,) * 3, (0.25,) * 3)
ORDER = TrainOrder(seed=1, num_images=50, batch_size=12)
RECIPES = {
    "plain": Data(),
    "moved": Data(augment=("pad_crop", "flip")),  # type: ignore[arg-type]
    "alternating": Data(augment=({"name": "flip", "mode": "alternating"}, "cutout")),  # type: ignore[arg-type]
    "on the host": Data(augment=("pad_crop", "rand_augment", "flip", "color_jitter")),  # type: ignore[arg-type]
    "mixed": Data(augment=("flip", "mixup", "cutmix")),  # type: ignore[arg-type]
}


def source() -> ArraySource:
    images = np.random.default_rng(0).integers(0, 256, (50, 16, 16, 3), dtype=np.uint8)
    return ArraySource(INFO, images, np.arange(50, dtype=np.int64) % 2)


def same(one: Batch, other: Batch) -> bool:
    return bool(
        torch.equal(one.images, other.images)
        and torch.equal(one.labels, other.labels)
        and np.array_equal(one.indices, other.indices)
        and torch.equal(one.draws, other.draws)
    )


def inline(data: Data, *, on_device: bool = False, size: int = 16) -> InlineLoader:
    options = LoaderOptions(0, pin_memory=False, on_device=on_device)
    loader = build_train_loader(data, source(), ORDER, lambda step: size, options)
    assert isinstance(loader, InlineLoader)
    return loader


def resident(inline_loader: InlineLoader, augments: tuple[Augment, ...] = ()) -> DeviceLoader:
    """Return the device loader with the schedule of another loader."""
    stats, timer = LoaderStats(time.perf_counter, 0, "device"), BatchTimer(time.perf_counter)
    return DeviceLoader(
        load_split_to_device(source(), torch.device("cpu")), inline_loader.batch_maker.schedule, augments, stats, timer
    )


def device_augments(data: Data, *, on_device: bool = False) -> tuple[Augment, ...]:
    return split_augments(build_augments(data.augment, INFO.mean), on_device=on_device)[0]


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_batches_equal_those_of_the_inline_loader(name: str, on_device: bool) -> None:
    alone = inline(RECIPES[name], on_device=on_device)
    loader = resident(alone, device_augments(RECIPES[name], on_device=on_device))
    expected, found = list(alone.batches(2, 11)), list(loader.batches(2, 11))
    assert len(expected) == len(found) == 9
    assert all(same(one, other) for one, other in zip(expected, found, strict=True))


def test_images_are_resized_and_a_second_iterator_starts_again() -> None:
    alone = inline(RECIPES["moved"], size=24)
    loader = resident(alone, device_augments(RECIPES["moved"]))
    next(loader.batches(0, 9))
    for _ in range(2):
        for one, other in zip(alone.batches(1, 7), loader.batches(1, 7), strict=True):
            assert same(one, other) and one.images.shape[-2:] == (24, 24)


def test_evaluation_batches_equal_those_of_the_inline_loader() -> None:
    alone = build_eval_loader(Data(), source(), EvalShard(50, 16), 16, LoaderOptions(0, pin_memory=False))
    assert isinstance(alone, InlineLoader)
    loader = resident(alone)
    for _ in range(2):
        batches = list(loader.batches(0, 4))
        assert [len(batch) for batch in batches] == [16, 16, 16, 2]
        assert all(same(one, other) for one, other in zip(alone.batches(0, 4), batches, strict=True))


def test_the_result_has_no_workers() -> None:
    loader = resident(inline(RECIPES["moved"]), device_augments(RECIPES["moved"]))
    list(loader.batches(0, 3))
    stats = loader.stats()
    assert stats is not None
    assert (stats.loader, stats.workers, stats.batches, stats.images, stats.busy) == ("device", 0, 3, 36, None)
    assert stats.bytes_read == stats.bytes_made == 36 * 3 * 16 * 16


def test_on_a_cpu_the_inline_loader_is_used() -> None:
    options = LoaderOptions(0, pin_memory=False, clock=time.perf_counter, loader="device")
    loader = build_train_loader(RECIPES["moved"], source(), ORDER, lambda step: 16, options)
    assert all(same(*pair) for pair in zip(inline(RECIPES["moved"]).batches(0, 9), loader.batches(0, 9), strict=True))
    stats = loader.stats()
    assert stats is not None and stats.loader == "device"
