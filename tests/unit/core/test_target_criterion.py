"""`TargetCriterion` in `core.statistics`: a target is reached after `patience` evaluations in a row."""

from paceline.core.statistics import TargetCriterion


def test_a_target_is_reached_after_patience_evaluations_in_a_row() -> None:
    seen = (0.5, 0.8, 0.7, 0.8, 0.9)
    assert TargetCriterion(0.8).first_reached_at(seen) == 1
    assert TargetCriterion(0.8, patience=2).first_reached_at(seen) == 4
    assert TargetCriterion(0.95).first_reached_at(seen) is None
    assert TargetCriterion(0.5).first_reached_at(()) is None


def test_an_evaluation_below_the_target_resets_the_count() -> None:
    goal = TargetCriterion(0.8, patience=2)
    assert [goal.count(hits, accuracy) for hits, accuracy in ((0, 0.8), (1, 0.9), (2, 0.79))] == [1, 2, 0]
    assert [goal.is_reached(hits) for hits in (0, 1, 2, 3)] == [False, False, True, True]
