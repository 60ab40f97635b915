"""Draws: fresh in every epoch, or alternating between two halves."""

import numpy as np

from paceline.core.random import Stream, uniform
from paceline.data.order import draw_uniform

INDICES = np.arange(10_000)


def test_fresh_draws_do_not_depend_on_alternating_ones():
    fresh = uniform(3, Stream.AUGMENT, 5, INDICES, 3)
    assert np.array_equal(draw_uniform(3, 5, INDICES, [False] * 3), fresh)
    assert np.array_equal(draw_uniform(3, 5, INDICES, [False, True, False])[:, [0, 2]], fresh[:, [0, 2]])


def test_an_alternating_draw_changes_halves_every_epoch_and_repeats_after_two():
    epochs = [draw_uniform(3, epoch, INDICES, [False, True])[:, 1] for epoch in range(4)]
    assert np.array_equal(epochs[0] < 0.5, epochs[1] >= 0.5)
    assert np.array_equal(epochs[0], epochs[2]) and np.array_equal(epochs[1], epochs[3])
    assert min(epoch.min() for epoch in epochs) >= 0 and max(epoch.max() for epoch in epochs) < 1


def test_an_alternating_draw_is_a_fair_coin_in_every_epoch():
    """5 standard errors of 10,000 tosses; the seed is fixed, so no flake."""
    for epoch in (0, 1):
        assert abs((draw_uniform(3, epoch, INDICES, [True]) < 0.5).mean() - 0.5) < 5 * 0.5 / np.sqrt(len(INDICES))


def test_alternating_draws_belong_to_the_sample_and_the_seed():
    few = np.array([7, 3])
    assert np.array_equal(draw_uniform(3, 1, few, [True, True]), draw_uniform(3, 1, INDICES, [True, True])[few])
    both = draw_uniform(3, 0, INDICES, [True, True])
    assert not np.array_equal(both[:, 0], both[:, 1])
    assert not np.array_equal(both, draw_uniform(4, 0, INDICES, [True, True]))
