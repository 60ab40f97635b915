"""When an accuracy was met: at the last of so many evaluations in a row."""

from paceline.core.statistics import TargetCriterion


def test_a_level_is_reached_at_the_last_of_so_many_evaluations_in_a_row() -> None:
    seen = (0.5, 0.8, 0.7, 0.8, 0.9)
    assert TargetCriterion(0.8).first_reached_at(seen) == 1
    assert TargetCriterion(0.8, patience=2).first_reached_at(seen) == 4
    assert TargetCriterion(0.95).first_reached_at(seen) is None
    assert TargetCriterion(0.5).first_reached_at(()) is None


def test_evaluations_below_the_level_begin_the_count_anew() -> None:
    goal = TargetCriterion(0.8, patience=2)
    assert [goal.count(hits, accuracy) for hits, accuracy in ((0, 0.8), (1, 0.9), (2, 0.79))] == [1, 2, 0]
    assert [goal.is_reached(hits) for hits in (0, 1, 2, 3)] == [False, False, True, True]
