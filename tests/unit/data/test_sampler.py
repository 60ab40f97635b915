"""Samplers: repeated augmentation has timm's batches, and a user's own sampler is checked."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from timm.data.distributed_sampler import RepeatAugSampler

from paceline.core.errors import RecipeError
from paceline.data import sampler as samplers
from paceline.data.loaders.sampler import build_sampler
from paceline.data.order import TrainBatchSchedule, TrainOrder
from paceline.data.sampler import EpochOrder, RepeatedSampler
from paceline.data.sources.build import build_datasets
from paceline.recipe.schema.data import Data
from paceline.recipe.schema.source import Synthetic

PLUGINS = '''
import numpy as np


class Half:
    """Every second image, in a random order."""

    def __init__(self, offset=0):
        self.offset = offset

    def __call__(self, seed, epoch, num_images):
        return np.random.default_rng([seed, epoch]).permutation(np.arange(self.offset, num_images, 2))


class Unseeded:
    def __call__(self, seed, epoch, num_images):
        return np.random.default_rng().permutation(num_images)


class Growing:
    def __call__(self, seed, epoch, num_images):
        return np.arange(num_images - 1 + epoch)


class Wrong:
    def __init__(self, kind):
        self.kind = kind

    def __call__(self, seed, epoch, num_images):
        wrong = {"list": [0], "int32": np.zeros(3, dtype=np.int32), "empty": np.zeros(0, dtype=np.int64),
                 "square": np.zeros((2, 2), dtype=np.int64), "high": np.array([0, num_images]), "low": np.array([-1])}
        if self.kind == "raises":
            raise OSError("gone")
        if self.kind == "exits":
            raise SystemExit(0)
        return wrong[self.kind]
'''


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_samplers.py").write_text(PLUGINS)
    monkeypatch.syspath_prepend(tmp_path)
    return "own_samplers"


def repeated(rank: int = 0, world_size: int = 1, batch_size: int = 24, repeats: int = 3) -> TrainOrder:
    return TrainOrder(3, 103, batch_size, rank, world_size, RepeatedSampler(repeats, batch_size))


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("repeats", [2, 3, 4])
def test_a_batch_has_the_samples_of_timms_sampler(world_size: int, repeats: int, monkeypatch) -> None:
    monkeypatch.setattr(
        samplers,
        "permutation",
        lambda seed, epoch, n: torch.randperm(n, generator=torch.Generator().manual_seed(epoch)).numpy(),
    )
    ours = repeated(batch_size=24, repeats=repeats)
    rank_batch = 24 // world_size
    for epoch in range(2):
        ranks = []
        for rank in range(world_size):
            theirs = RepeatAugSampler(range(103), world_size, rank, num_repeats=repeats, selected_round=0)
            theirs.set_epoch(epoch)
            ranks.append(list(theirs))
        for position in range(4):
            taken = slice(position * rank_batch, (position + 1) * rank_batch)
            expected = Counter(index for rank in ranks for index in rank[taken])
            assert Counter(ours.indices(epoch * 4 + position).tolist()) == expected


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ranks_share_the_batch_of_one_rank(world_size: int) -> None:
    for step in range(9):
        parts = [repeated(rank, world_size) for rank in range(world_size)]
        assert np.concatenate([part.indices(step) for part in parts]).tolist() == repeated().indices(step).tolist()
        assert np.concatenate([part.draw_keys(step) for part in parts]).tolist() == repeated().draw_keys(step).tolist()


@pytest.mark.parametrize(
    ("batch_size", "repeats"), [(4, 2), (6, 2), (6, 3), (8, 3), (10, 3), (10, 5), (24, 3), (26, 4)]
)
@pytest.mark.parametrize("num_images", [26, 27, 100, 103])
def test_versions_of_an_image_are_no_neighbours_and_have_their_own_draws(batch_size, repeats, num_images) -> None:
    order = TrainOrder(1, num_images, batch_size, sampler=RepeatedSampler(repeats, batch_size))
    assert order.steps_per_epoch == num_images // batch_size
    indices = np.concatenate([order.indices(step) for step in range(order.steps_per_epoch)])
    keys = np.concatenate([order.draw_keys(step) for step in range(order.steps_per_epoch)])
    assert (indices[0::2] != indices[1::2]).all()
    assert len(set(keys.tolist())) == len(keys) and np.array_equal(keys % num_images, indices)
    assert max(Counter(indices.tolist()).values()) == repeats
    draws = TrainBatchSchedule(order, lambda step: 8, [False, True], 0)
    assert len(np.unique(np.concatenate([draws.draws(step) for step in range(order.steps_per_epoch)]), axis=0)) == len(
        keys
    )


def test_keys_count_how_often_an_image_came_before() -> None:
    order = EpochOrder.from_indices(np.array([4, 0, 4, 1, 0, 4]), 5)
    assert order.draw_keys.tolist() == [4, 0, 9, 1, 5, 14]
    whole = RepeatedSampler(3, 24).order(0, 1, 103)
    assert np.array_equal(EpochOrder.from_indices(whole.indices, 103).draw_keys, whole.draw_keys)


def own(name: str, **args: object) -> TrainOrder:
    data = Data(source=Synthetic(num_images=20, image_size=1), sampler={"name": name, "args": args}, batch_size=4)  # type: ignore[arg-type]
    sampler = build_sampler(data, build_datasets(data.source, may_download=False).train, lambda duration: 0)
    return TrainOrder(7, 20, 4, sampler=sampler)


def test_an_own_sampler_decides_the_length_of_an_epoch_and_its_images(plugins: str) -> None:
    order = own(f"{plugins}:Half", offset=1)
    assert order.steps_per_epoch == 2
    for epoch in range(2):
        expected = np.random.default_rng([7, epoch]).permutation(np.arange(1, 20, 2))[:8]
        assert np.concatenate([order.indices(epoch * 2 + step) for step in range(2)]).tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("name", "args", "problem"),
    [
        ("Wrong", {"kind": "list"}, "returns list (return the indices of samples, a numpy array int64 [M])"),
        ("Wrong", {"kind": "int32"}, "returns int32 [3] (return the indices"),
        ("Wrong", {"kind": "empty"}, "returns int64 [0] (return the indices"),
        ("Wrong", {"kind": "square"}, "returns int64 [2, 2] (return the indices"),
        ("Wrong", {"kind": "high"}, "returns index 20 (return 0 to 19 for 20 images)"),
        ("Wrong", {"kind": "low"}, "returns index -1 (return 0 to 19 for 20 images)"),
        ("Wrong", {"kind": "raises"}, "raised OSError: gone"),
        ("Wrong", {"kind": "exits"}, "raised SystemExit: 0"),
        ("Unseeded", {}, "returns two orders for one seed and epoch (draw from"),
        ("Growing", {}, "returns 20 indices for epoch 1, and 19 for epoch 0 (return as many)"),
    ],
)
def test_an_own_sampler_that_breaks_its_contract_is_named(plugins: str, name: str, args: dict, problem: str) -> None:
    with pytest.raises(RecipeError) as caught:
        own(f"{plugins}:{name}", **args).indices(4)
    assert str(caught.value).startswith(f"data.sampler.name: {plugins}:{name} {problem}")
