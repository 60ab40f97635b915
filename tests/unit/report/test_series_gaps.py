"""Curves over time whose points are not evenly spaced: where they break, and their mean."""

import pytest

from paceline.report.series import split_at_gaps, time_weighted_mean


def doubling(num, every=10):
    """Return points whose distance doubles after each `every`."""
    x, found = 0.0, []
    for index in range(num):
        x += 2.0 ** (index // every)
        found.append((x, float(index)))
    return found


def test_a_line_whose_samples_become_rare_is_one_piece():
    assert len(list(split_at_gaps(doubling(80)))) == 1


@pytest.mark.parametrize("at", [1, 5, 35, 79])
def test_a_pause_splits_a_line(at):
    points = doubling(80)
    pause = 12 * (points[at][0] - points[at - 1][0])
    broken = [*points[:at], *((x + pause, y) for x, y in points[at:])]
    assert [len(piece) for piece in split_at_gaps(broken)] == [at, 80 - at]


def test_a_few_points_are_one_piece():
    assert list(split_at_gaps([(0, 1), (1, 1), (100, 1)])) == [[(0, 1), (1, 1), (100, 1)]]


def test_a_mean_over_time_counts_a_value_for_as_long_as_it_stands():
    assert time_weighted_mean([(0, 5.0), (1, 1.0), (4, 3.0)]) == (1 * 1.0 + 3 * 3.0) / 4


def test_a_time_weighted_mean_ignores_gaps():
    points = [(float(x), 1.0) for x in range(20)] + [(float(x), 3.0) for x in range(1000, 1020)]
    assert time_weighted_mean(points) == 2.0


def test_the_mean_of_a_single_sample_is_its_value():
    assert time_weighted_mean([(7.0, 0.25)]) == 0.25
