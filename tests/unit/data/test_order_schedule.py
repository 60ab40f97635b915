"""The draws of a batch depend neither on the group of steps drawn together, nor on earlier requests."""

import numpy as np
import pytest

from paceline.data.order import EvalBatchSchedule, EvalShard, TrainBatchSchedule, TrainOrder, draw_uniform

ORDER = TrainOrder(seed=5, num_images=50, batch_size=8, rank=1, world_size=2)
ALTERNATING = (False, True, False, False, False)


def schedule(at_once: int) -> TrainBatchSchedule:
    return TrainBatchSchedule(
        ORDER, lambda step: 10 + step, ALTERNATING, 2, lambda draws, step: draws * (2 + step), at_once
    )


@pytest.mark.parametrize("at_once", [1, 2, 4, 100])
@pytest.mark.parametrize("requested", [range(20), range(19, -1, -1), [3, 3, 17, 4, 5, 0]], ids=["on", "back", "about"])
def test_draws_of_a_group_equal_draws_of_single_steps(at_once: int, requested) -> None:
    several = schedule(at_once)
    for step in requested:
        expected = draw_uniform(5, step // 6, ORDER.indices(step), ALTERNATING)
        expected[:, 3:] *= 2 + step
        assert np.array_equal(several.draws(step), expected)
        assert np.array_equal(several.indices(step), ORDER.indices(step)) and several.size(step) == 10 + step


def test_draws_of_one_group_are_cached() -> None:
    several = schedule(4)
    for step in range(40):
        several.draws(step)
    assert len(several._drawn) <= 4


def test_evaluation_draws_nothing() -> None:
    found = EvalBatchSchedule(EvalShard(10, 4), 32)
    assert [len(found.indices(number)) for number in range(3)] == [4, 4, 2]
    assert [found.draws(number).shape for number in range(3)] == [(4, 0), (4, 0), (2, 0)]
    assert found.size(1) == 32 and found.describe(1) == "evaluation batch 2"
