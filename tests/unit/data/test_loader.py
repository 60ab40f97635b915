"""Batches are a function of the step: not of the worker, nor of where a run starts."""

import os
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from paceline.core.dataset import ArraySource, DatasetInfo, Sample
from paceline.core.errors import DataError
from paceline.data.loader import (
    Batch,
    InlineLoader,
    LoaderOptions,
    WorkerLoader,
    build_eval_loader,
    build_train_loader,
)
from paceline.data.sampler import EvalShard, TrainOrder
from paceline.recipe.schema.data import Data

INFO = DatasetInfo("made", "train", 50, ("a", "b"), 3, (16, 16), (0.5,) * 3, (0.25,) * 3)
AUGMENT = Data(augment=("pad_crop", "flip", "rotate"))  # type: ignore[arg-type]
MIX = Data(augment=("pad_crop", {"name": "flip", "mode": "alternating"}, "mixup", "cutmix"))  # type: ignore[arg-type]
CROP = Data(augment=("random_resized_crop", "flip"))  # type: ignore[arg-type]


def source() -> ArraySource:
    images = np.random.default_rng(0).integers(0, 256, (50, 16, 16, 3), dtype=np.uint8)
    return ArraySource(INFO, images, np.arange(50, dtype=np.int64) % 2)


class BadSource:
    """A source whose sample 7 cannot be read."""

    info = INFO

    def __len__(self) -> int:
        return 50

    def read(self, index: int) -> Sample:
        if index == 7:
            raise DataError("made/7.jpg: cannot be decoded (remove it)")
        return np.zeros((16, 16, 3), np.uint8), 0

    def name_of(self, index: int) -> str:
        return f"made/{index}.jpg"


def batches(data: Data, first: int, stop: int, *, workers: int = 0, rank: int = 0, world: int = 1) -> Iterator[Batch]:
    order = TrainOrder(seed=1, num_images=50, batch_size=12, rank=rank, world_size=world)
    return build_train_loader(data, source(), order, always_16, LoaderOptions(workers, False)).batches(first, stop)


def always_16(step: int) -> int:
    return 16


def same(one: Batch, other: Batch) -> bool:
    return bool(
        torch.equal(one.images, other.images)
        and torch.equal(one.labels, other.labels)
        and np.array_equal(one.indices, other.indices)
        and torch.equal(one.draws, other.draws)
    )


@pytest.mark.parametrize("data", [AUGMENT, CROP, MIX], ids=["gathered", "one by one", "mixed"])
@pytest.mark.parametrize("workers", [1, 2])
def test_workers_make_the_same_batches_as_the_rank_itself(data: Data, workers: int) -> None:
    inline, ahead = list(batches(data, 0, 9)), list(batches(data, 0, 9, workers=workers))
    assert len(inline) == len(ahead) == 9
    assert all(same(one, other) for one, other in zip(inline, ahead, strict=True))


@pytest.mark.parametrize("data", [AUGMENT, CROP, MIX], ids=["gathered", "one by one", "mixed"])
def test_starting_later_gives_the_same_batches(data: Data) -> None:
    whole, tail = list(batches(data, 0, 9)), list(batches(data, 5, 9))
    assert all(same(one, other) for one, other in zip(whole[5:], tail, strict=True))


@pytest.mark.parametrize("data", [AUGMENT, CROP, MIX], ids=["gathered", "one by one", "mixed"])
def test_ranks_together_make_the_batch_of_one_rank(data: Data) -> None:
    parts = [list(batches(data, 0, 9, rank=rank, world=3)) for rank in range(3)]
    for step, whole in enumerate(batches(data, 0, 9)):
        assert torch.equal(torch.cat([part[step].images for part in parts]), whole.images)
        assert torch.equal(torch.cat([part[step].draws for part in parts]), whole.draws)


def test_a_sample_is_augmented_anew_each_epoch() -> None:
    seen: dict[int, list[torch.Tensor]] = {}
    for batch in batches(AUGMENT, 0, 12):
        for index, image in zip(batch.indices.tolist(), batch.images, strict=True):
            seen.setdefault(index, []).append(image)
    repeated = [images for images in seen.values() if len(images) > 1]
    assert len(repeated) > 30
    assert sum(torch.equal(images[0], images[1]) for images in repeated) < len(repeated) / 10


def test_an_alternating_flip_shows_every_image_both_ways_in_two_epochs() -> None:
    data = Data(augment=({"name": "flip", "mode": "alternating"},))  # type: ignore[arg-type]
    seen: dict[int, list[torch.Tensor]] = {}
    for batch in batches(data, 0, 16):
        for index, image in zip(batch.indices.tolist(), batch.images, strict=True):
            seen.setdefault(index, []).append(image)
    whole = [images for images in seen.values() if len(images) == 4]  # an epoch leaves 2 of the 50 images out
    assert len(whole) > 40
    for first, second, third, fourth in whole:
        assert torch.equal(first, second.flip(2)) and not torch.equal(first, second)
        assert torch.equal(first, third) and torch.equal(second, fourth)


@pytest.mark.parametrize("data", [AUGMENT, CROP], ids=["gathered", "one by one"])
def test_the_size_of_a_batch_is_the_one_of_its_step(data: Data) -> None:
    order = TrainOrder(seed=1, num_images=50, batch_size=12)
    sizes = {0: 8, 1: 16, 2: 24}
    loader = build_train_loader(data, source(), order, sizes.__getitem__, LoaderOptions(0, False))
    assert [batch.images.shape[-2:] for batch in loader.batches(0, 3)] == [(8, 8), (16, 16), (24, 24)]


def test_evaluation_batches_are_the_images_as_they_are() -> None:
    loader = build_eval_loader(AUGMENT, source(), EvalShard(50, 16), 16, LoaderOptions(0, False))
    images = torch.cat([batch.images for batch in loader.batches(0, 4)])
    assert torch.equal(images, torch.from_numpy(source().images.transpose(0, 3, 1, 2).copy()))


@pytest.mark.parametrize("workers", [0, 2])
def test_an_unreadable_sample_raises_its_own_error_from_anywhere(workers: int) -> None:
    order = TrainOrder(seed=1, num_images=50, batch_size=25)
    loader = build_train_loader(Data(), BadSource(), order, always_16, LoaderOptions(workers, False))
    with pytest.raises(DataError, match=r"^made/7.jpg: cannot be decoded \(remove it\)$"):
        list(loader.batches(0, 2))


def test_workers_end_when_the_rank_stops_early() -> None:
    ahead = batches(AUGMENT, 0, 1000, workers=2)
    next(ahead)
    children = _children()
    assert len(children) >= 2
    ahead.close()  # type: ignore[attr-defined]
    del ahead
    deadline = time.monotonic() + 20
    while _children() & children and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _children() & children


def _children() -> set[int]:
    psutil = pytest.importorskip("psutil")
    return {child.pid for child in psutil.Process(os.getpid()).children(recursive=True)}


def test_a_batch_splits_into_equal_micro_batches_in_order() -> None:
    whole = next(iter(batches(MIX, 0, 1)))
    parts = whole.split(3)
    assert [len(part) for part in parts] == [4, 4, 4]
    assert torch.equal(torch.cat([part.images for part in parts]), whole.images)
    assert torch.equal(torch.cat([part.draws for part in parts]), whole.draws)
    assert whole.draws.shape == (12, 4) and whole.draws.dtype == torch.float64
    assert np.concatenate([part.indices for part in parts]).tolist() == whole.indices.tolist()


def test_no_workers_means_no_processes() -> None:
    order = TrainOrder(seed=1, num_images=50, batch_size=12)
    inline, ahead = (
        build_train_loader(Data(), source(), order, always_16, LoaderOptions(workers, False)) for workers in (0, 1)
    )
    assert isinstance(inline, InlineLoader) and isinstance(ahead, WorkerLoader)
