"""When an accuracy was met: at the last of so many evaluations in a row."""

from paceline.core.goal import met_at


def test_a_level_is_met_at_the_last_of_so_many_evaluations_in_a_row() -> None:
    seen = (0.5, 0.8, 0.7, 0.8, 0.9)
    assert met_at(seen, 0.8) == 1
    assert met_at(seen, 0.8, patience=2) == 4
    assert met_at(seen, 0.95) is None
    assert met_at((), 0.5) is None
