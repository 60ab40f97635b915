"""Pairs of ranks are scheduled in rounds."""

from itertools import combinations

import pytest

from paceline.lab.link_timing import schedule_pairs


@pytest.mark.parametrize("ranks", [[0, 1], [0, 4, 8], list(range(0, 64, 4)), list(range(7))])
def test_each_two_meet_once_and_no_one_is_in_two_places(ranks: list[int]) -> None:
    drawn = list(schedule_pairs(ranks))
    assert sorted(pair for turn in drawn for pair in turn) == sorted(combinations(ranks, 2))
    assert all(len({rank for pair in turn for rank in pair}) == 2 * len(turn) for turn in drawn)
    assert len(drawn) == len(ranks) - 1 + len(ranks) % 2
