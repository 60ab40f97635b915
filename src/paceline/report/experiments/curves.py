"""Draw measurements as curves with markers and intervals."""

from collections.abc import Iterable

from paceline.core.interval import Interval
from paceline.report.blocks import ChartLine
from paceline.report.thin import Point
from paceline.report.words import finite_or_none


def measured_line(name: str, values: Iterable[tuple[float, Interval | None]], group: str = "") -> ChartLine:
    """Return a line of markers in order of x, without missing and non-finite values."""
    points: list[Point] = []
    bounds: dict[Point, tuple[float, float]] = {}
    for x, each in sorted(values, key=lambda pair: pair[0]):
        value = None if each is None else finite_or_none(each.value)
        if each is None or value is None:
            continue
        points.append((x, value))
        low, high = finite_or_none(each.low), finite_or_none(each.high)
        if low is not None and high is not None:
            bounds[x, value] = (low, high)
    return ChartLine(name, points, has_markers=True, group=group, bounds=bounds)


def plain_line(name: str, values: Iterable[tuple[float, float | None]], *, marked: bool = True) -> ChartLine:
    """Return a line without intervals in order of x, without missing and non-finite values."""
    points = {(x, value) for x, each in values if (value := finite_or_none(each)) is not None}
    return ChartLine(name, sorted(points), has_markers=marked)


def scale_interval(interval: Interval | None, factor: float) -> Interval | None:
    """Return an interval multiplied by `factor`; None for None."""
    if interval is None:
        return None
    low, high = (None if each is None else factor * each for each in (interval.low, interval.high))
    return Interval(value=factor * interval.value, low=low, high=high, n=interval.n)
