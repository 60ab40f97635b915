"""The timer adds up turns, also those that fail, and those that end in another thread."""

import threading

import pytest

from paceline.measure.timer import StageTimer, now_s


def test_turns_add_up() -> None:
    timer = StageTimer(now=iter([1.0, 3.0, 10.0, 10.5]).__next__)
    for _ in range(2):
        with timer.turn():
            pass
    assert (timer.turns, timer.total_s, timer.slowest_s) == (2, 2.5, 2.0)


def test_a_turn_that_raises_counts() -> None:
    timer = StageTimer(now=iter([1.0, 3.0]).__next__)
    with pytest.raises(KeyError), timer.turn():
        raise KeyError
    assert (timer.turns, timer.total_s) == (1, 2.0)


def test_a_turn_may_end_in_another_thread() -> None:
    timer = StageTimer(now=iter([1.0, 4.0]).__next__)
    thread = threading.Thread(target=timer.end, args=(timer.begin(),))
    thread.start()
    thread.join(timeout=60)
    assert (timer.turns, timer.total_s) == (1, 3.0)


def test_time_does_not_go_backwards() -> None:
    times = [now_s() for _ in range(100)]
    assert times == sorted(times)
