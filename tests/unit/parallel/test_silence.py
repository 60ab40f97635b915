"""How long a count has stood still."""

from paceline.parallel.heartbeat import StallTimer


def test_a_count_that_stands_is_silent_for_as_long_as_it_has_been_looked_at() -> None:
    silence = StallTimer(0.5)
    assert [silence.update(7, now_s) for now_s in (100.0, 100.5, 101.0, 101.25)] == [0.0, 0.5, 1.0, 1.25]


def test_a_count_that_moves_is_not_silent() -> None:
    silence = StallTimer(0.5)
    assert [silence.update(count, 100 + count / 2) for count in range(9)] == [0.0] * 9
    assert [silence.update(8, 104.5), silence.update(9, 105.0), silence.update(9, 105.5)] == [0.5, 0.0, 0.5]


def test_an_hour_in_which_nobody_looked_is_not_an_hour_of_silence() -> None:
    """All ranks may have been suspended for it, and whoever wakes up first looks at one that sleeps."""
    silence = StallTimer(0.5)
    assert [silence.update(7, now_s) for now_s in (100.0, 100.5, 3700.0, 3700.5)] == [0.0, 0.5, 1.5, 2.0]
