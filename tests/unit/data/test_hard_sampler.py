"""Images of higher weight are drawn more often, each about as often as its weight says, and alike on all ranks."""

import numpy as np
import pytest

from paceline.data.hard_sampler import HardSampler, ImageWeights
from paceline.data.order import TrainOrder
from paceline.data.sampler import ShuffleSampler

NUM, BATCH = 103, 12


def sampler(values: np.ndarray) -> HardSampler:
    weights = ImageWeights()
    weights.update(values.astype(np.int64), step=8)
    return HardSampler(weights)


def test_without_weights_and_with_equal_ones_the_order_is_that_of_a_shuffle() -> None:
    shuffled = ShuffleSampler().select(3, 2, 5, 60, NUM)
    for hard in (HardSampler(ImageWeights()), sampler(np.full(NUM, 7))):
        selected = hard.select(3, 2, 5, 60, NUM)
        assert np.array_equal(selected.indices, shuffled.indices)
        assert np.array_equal(selected.draw_keys, shuffled.draw_keys)


def test_an_epoch_draws_each_image_as_often_as_its_weight_says() -> None:
    values = np.random.default_rng(0).integers(1, 2**22, NUM)
    hard, expected = sampler(values), NUM * values / values.sum()
    counts = []
    for epoch in range(400):
        indices, keys = hard.select(1, epoch, 0, NUM, NUM)
        counts.append(np.bincount(indices, minlength=NUM))
        assert np.array_equal(keys % NUM, indices)
        assert len(set(keys.tolist())) == NUM  # each repetition is augmented differently
    # At most one stratum at either end belongs to an image in part.
    assert (np.abs(np.array(counts) - expected) < 2).all()
    assert np.mean(counts, axis=0) == pytest.approx(expected, abs=0.15)


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_ranks_together_draw_what_one_rank_draws(world_size: int) -> None:
    hard = sampler(np.arange(1, NUM + 1) ** 2)
    whole = TrainOrder(3, NUM, BATCH, sampler=hard)
    parts = [TrainOrder(3, NUM, BATCH, rank, world_size, hard) for rank in range(world_size)]
    for step in (0, 7, 9):
        assert np.array_equal(np.concatenate([part.indices(step) for part in parts]), whole.indices(step))
        assert np.array_equal(np.concatenate([part.draw_keys(step) for part in parts]), whole.draw_keys(step))


def test_the_effective_sample_size_counts_equal_weights() -> None:
    assert sampler(np.full(50, 3)).weights.effective_images == pytest.approx(50)
    assert sampler(np.array([10**9, *[1] * 49])).weights.effective_images == pytest.approx(1, abs=1e-5)
