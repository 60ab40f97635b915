"""Properties of the order for any number of samples, batch size and world size."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paceline.data.order import EvalShard, TrainOrder

SEEDS = st.integers(0, 2**63 - 1)


@st.composite
def orders(draw: st.DrawFn) -> tuple[TrainOrder, int]:
    """An order of at least one batch, and a number of ranks that the batch divides over."""
    world_size, rank_batch = draw(st.integers(1, 8)), draw(st.integers(1, 9))
    batch_size = world_size * rank_batch
    num_images = draw(st.integers(batch_size, 6 * batch_size + 5))
    return TrainOrder(draw(SEEDS), num_images, batch_size), world_size


def of_rank(order: TrainOrder, rank: int, world_size: int) -> TrainOrder:
    return TrainOrder(order.seed, order.num_images, order.batch_size, rank, world_size)


# matrix: 8
@given(orders(), st.integers(0, 50))
def test_an_epoch_takes_distinct_samples_and_leaves_out_less_than_a_batch(case, epoch: int) -> None:
    order, _ = case
    first = epoch * order.steps_per_epoch
    steps = range(first, first + order.steps_per_epoch)
    taken = np.concatenate([order.indices(step) for step in steps])
    assert {order.epoch(step) for step in steps} == {epoch}
    assert len(taken) == len(set(taken.tolist())) > order.num_images - order.batch_size
    assert taken.min() >= 0 and taken.max() < order.num_images


@given(orders(), st.integers(0, 200))
def test_ranks_divide_the_batch_in_order(case, step: int) -> None:
    order, world_size = case
    parts = [of_rank(order, rank, world_size).indices(step) for rank in range(world_size)]
    assert {len(part) for part in parts} == {order.batch_size // world_size}
    assert np.concatenate(parts).tolist() == order.indices(step).tolist()


@given(orders(), st.lists(st.integers(0, 60), min_size=1, max_size=12))
def test_a_resumed_order_continues_the_full_order(case, requested: list[int]) -> None:
    """For any sequence of steps: from one on, backwards, or random."""
    order, world_size = case
    whole = [order.indices(step).tolist() for step in range(61)]
    resumed = of_rank(order, 0, 1)
    assert [resumed.indices(step).tolist() for step in requested] == [whole[step] for step in requested]
    rank_batch = order.batch_size // world_size
    on_ranks = of_rank(order, world_size - 1, world_size)
    assert [on_ranks.indices(step).tolist() for step in requested] == [whole[step][-rank_batch:] for step in requested]


@given(st.integers(1, 400), st.integers(1, 64), st.integers(1, 17), st.integers(0, 300))
def test_every_image_is_evaluated_once_in_order(num_images: int, batch: int, world_size: int, more: int) -> None:
    shards = [
        EvalShard(num_images, batch, rank, world_size, split_size=num_images + more) for rank in range(world_size)
    ]
    batches = [[shard.indices(number) for number in range(shard.num_batches)] for shard in shards]
    assert all(0 < len(each) <= batch for shard in batches for each in shard)
    sizes = [sum(len(each) for each in shard) for shard in batches]
    assert sum(sizes) == num_images and max(sizes) - min(sizes) <= 1
    seen = [index for shard in batches for each in shard for index in each.tolist()]
    assert seen == sorted(set(seen)) and seen[0] >= 0 and seen[-1] < num_images + more
    if not more:
        assert seen == list(range(num_images))
