"""The exact order: which samples a global step takes, whoever asks."""

import numpy as np
import pytest

from paceline.data.sampler import EvalShard, TrainOrder


def order(rank: int = 0, world_size: int = 1) -> TrainOrder:
    return TrainOrder(seed=3, num_images=103, batch_size=12, rank=rank, world_size=world_size)


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


def test_epochs_differ_in_order_and_in_what_they_leave_out() -> None:
    whole = order()
    epochs = [
        np.concatenate([whole.indices(epoch * 8 + position) for position in range(8)]).tolist() for epoch in range(6)
    ]
    assert len({tuple(epoch) for epoch in epochs}) == 6
    assert len({frozenset(epoch) for epoch in epochs}) > 1


def test_steps_may_be_asked_for_in_any_order() -> None:
    forwards, backwards = order(), order()
    taken = [forwards.indices(step).tolist() for step in range(20)]
    assert [backwards.indices(step).tolist() for step in reversed(range(20))] == taken[::-1]


@pytest.mark.parametrize("num_images", [1, 3, 21, 360])
@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_every_image_is_evaluated_once_by_one_rank(num_images: int, world_size: int) -> None:
    shards = [EvalShard(num_images, batch=8, rank=rank, world_size=world_size) for rank in range(world_size)]
    seen = [index for shard in shards for number in range(shard.num_batches) for index in shard.indices(number)]
    assert seen == list(range(num_images))


def test_a_rank_without_images_evaluates_no_batch() -> None:
    assert EvalShard(1, batch=8, rank=0, world_size=2).num_batches == 0
