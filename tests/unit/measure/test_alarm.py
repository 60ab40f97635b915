"""An alarm rings once an interval, however often it is asked."""

from paceline.measure.throughput import IntervalTimer


def test_it_rings_once_an_interval() -> None:
    now = [100.0]
    alarm = IntervalTimer(10.0, lambda: now[0])
    rings = []
    for second in (0, 9, 10, 10, 19, 25, 26, 35):
        now[0] = 100.0 + second
        rings.append(alarm.is_due())
    assert rings == [False, False, True, False, False, True, False, True]


def test_zero_never_rings() -> None:
    now = [0.0]
    alarm = IntervalTimer(0.0, lambda: now[0])
    now[0] = 1e9
    assert not alarm.is_due()
