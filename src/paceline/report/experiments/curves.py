"""Measurements as curves: marked points with their intervals."""

from collections.abc import Iterable

from paceline.core.interval import Interval
from paceline.report.blocks import Line
from paceline.report.thin import Point
from paceline.report.words import finite


def measured(name: str, found: Iterable[tuple[float, Interval | None]], group: str = "") -> Line:
    """Return a line of marked points in the order of x; what was not measured, or is no number, is left out."""
    points: list[Point] = []
    bounds: dict[Point, tuple[float, float]] = {}
    for x, each in sorted(found, key=lambda pair: pair[0]):
        value = None if each is None else finite(each.value)
        if each is None or value is None:
            continue
        points.append((x, value))
        low, high = finite(each.low), finite(each.high)
        if low is not None and high is not None:
            bounds[x, value] = (low, high)
    return Line(name, points, marked=True, group=group, bounds=bounds)


def plain(name: str, found: Iterable[tuple[float, float | None]], *, marked: bool = True) -> Line:
    """Return a line of values without intervals, in the order of x; what is no number is left out."""
    points = {(x, value) for x, each in found if (value := finite(each)) is not None}
    return Line(name, sorted(points), marked=marked)


def times(found: Interval | None, factor: float) -> Interval | None:
    """Return an interval in another unit; None where there is none."""
    if found is None:
        return None
    low, high = (None if each is None else factor * each for each in (found.low, found.high))
    return Interval(value=factor * found.value, low=low, high=high, n=found.n)
