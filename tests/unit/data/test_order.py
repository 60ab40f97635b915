"""The exact order: the samples of a global step, for any rank and world size."""

import numpy as np
import pytest

from paceline.core.random import permutation
from paceline.data import sampler
from paceline.data.order import EvalShard, TrainOrder
from paceline.data.sampler import ShuffleSampler


def order(rank: int = 0, world_size: int = 1) -> TrainOrder:
    return TrainOrder(seed=3, num_images=103, batch_size=12, rank=rank, world_size=world_size)


# matrix: 8
@pytest.mark.parametrize("world_size", [2, 3, 4, 6])
def test_ranks_share_the_slice_that_one_rank_takes(world_size: int) -> None:
    for step in range(20):
        parts = [order(rank, world_size).indices(step) for rank in range(world_size)]
        assert np.concatenate(parts).tolist() == order().indices(step).tolist()


def test_an_epoch_visits_no_sample_twice_and_leaves_out_less_than_a_batch() -> None:
    whole = order()
    visited = np.concatenate([whole.indices(step) for step in range(whole.steps_per_epoch)])
    assert len(visited) == len(set(visited.tolist())) == 96
    assert set(visited.tolist()) <= set(range(103))


# matrix: 8
def test_epochs_differ_in_order_and_in_what_they_leave_out() -> None:
    whole = order()
    epochs = [
        np.concatenate([whole.indices(epoch * 8 + position) for position in range(8)]).tolist() for epoch in range(6)
    ]
    assert len({tuple(epoch) for epoch in epochs}) == 6
    assert len({frozenset(epoch) for epoch in epochs}) > 1


def test_steps_may_be_requested_in_any_order() -> None:
    forwards, backwards = order(), order()
    taken = [forwards.indices(step).tolist() for step in range(20)]
    assert [backwards.indices(step).tolist() for step in reversed(range(20))] == taken[::-1]


# matrix: 9
@pytest.mark.parametrize("num_images", [1, 3, 21, 360])
@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_every_image_is_evaluated_once_by_one_rank(num_images: int, world_size: int) -> None:
    shards = [EvalShard(num_images, batch_size=8, rank=rank, world_size=world_size) for rank in range(world_size)]
    seen = [index for shard in shards for number in range(shard.num_batches) for index in shard.indices(number)]
    assert seen == list(range(num_images))


@pytest.mark.parametrize(("num_images", "of"), [(1, 5), (7, 20), (20, 20), (359, 1438), (13, 1000)])
def test_a_subset_has_the_same_distinct_samples_in_order_for_any_world_size(num_images: int, of: int) -> None:
    seen = {}
    for world_size in (1, 3):
        shards = [
            EvalShard(num_images, 8, rank=rank, world_size=world_size, split_size=of) for rank in range(world_size)
        ]
        parts = [shard.indices(number) for shard in shards for number in range(shard.num_batches)]
        seen[world_size] = np.concatenate(parts).tolist()
    assert seen[1] == seen[3] == sorted(set(seen[1]))
    assert len(seen[1]) == num_images and seen[1][0] >= 0 and seen[1][-1] < of


@pytest.mark.parametrize(
    "classes", [np.repeat(np.arange(10), 100), np.tile(np.arange(10), 100)], ids=["sorted", "round"]
)
def test_a_subset_has_images_of_each_class_even_if_the_split_is_sorted(classes: np.ndarray) -> None:
    shard = EvalShard(200, batch_size=200, split_size=len(classes))
    counts = np.bincount(classes[shard.indices(0)], minlength=10)
    assert counts.sum() == 200 and counts.min() >= 10 and counts.max() <= 30


def test_more_samples_than_there_are_cannot_be_evaluated() -> None:
    with pytest.raises(AssertionError, match="6 of 5 samples"):
        EvalShard(6, batch_size=8, split_size=5)


def test_a_rank_without_images_evaluates_no_batch() -> None:
    assert EvalShard(1, batch_size=8, rank=0, world_size=2).num_batches == 0


@pytest.mark.parametrize("num_images", [1, 16, 37, 40])
@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_the_batches_of_all_ranks_may_be_the_same_for_any_number_of_them(num_images: int, world_size: int) -> None:
    whole = EvalShard(num_images, 8)
    shards = [EvalShard(num_images, 8, rank, world_size, has_same_batches=True) for rank in range(world_size)]
    batches = [shard.indices(number).tolist() for shard in shards for number in range(shard.num_batches)]
    assert batches == [whole.indices(number).tolist() for number in range(whole.num_batches)]


def test_permutations_of_two_epochs_are_cached(monkeypatch) -> None:
    """Threads that share an order may still be in the previous epoch."""
    drawn: list[int] = []

    def drawing(seed: int, epoch: int, n: int) -> np.ndarray:
        drawn.append(epoch)
        return permutation(seed, epoch, n)

    monkeypatch.setattr(sampler, "permutation", drawing)
    whole = order()
    for step in (7, 8, 7, 9, 7, 15, 8, 16, 15, 17, 7):
        whole.indices(step)
    assert drawn == [0, 1, 2, 0]  # epoch 0 was dropped for epoch 2


def test_without_shuffling_every_epoch_has_the_order_of_the_source_for_any_world_size() -> None:
    def stored(rank: int = 0, world_size: int = 1) -> TrainOrder:
        return TrainOrder(3, 103, 12, rank, world_size, sampler=ShuffleSampler(is_random=False))

    for step in range(20):
        begin = step % 8 * 12
        assert stored().indices(step).tolist() == list(range(begin, begin + 12))
        parts = [stored(rank, 3).indices(step) for rank in range(3)]
        assert np.concatenate(parts).tolist() == stored().indices(step).tolist()
