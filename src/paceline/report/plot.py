"""Lay out charts as SVG geometry: lines, ticks and labels. Pure; the template draws it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from paceline.core.units import number
from paceline.report.axis import Axis, axis, decades, doublings
from paceline.report.blocks import Chart, Line
from paceline.report.gaps import pieces
from paceline.report.thin import Point, thin_points
from paceline.report.words import clean

WIDTH, HEIGHT = 440.0, 236.0
MAX_LINES = 32
_TOP, _BOTTOM, _LETTER, _BOLD, _LABEL = 22.0, 34.0, 6.9, 8.2, 13.0
_POINTS_OF_ALL = 2000  # over all lines of a chart
NUM_DISTINCT = 4
_LONGEST_LABEL = 14
_NUM_HINTS = 60


@dataclass(frozen=True)
class Mark:
    """A text at a position."""

    x: float
    y: float
    text: str


@dataclass(frozen=True)
class Within:
    """The vertical extent of an interval at `x`."""

    x: float
    low: float
    high: float


@dataclass(frozen=True)
class Curve:
    """A line: its CSS class, unbroken pieces as SVG points, markers, error bars, and the label at its end."""

    style: str
    name: str
    pieces: tuple[str, ...]
    dots: tuple[Mark, ...]
    bars: tuple[Within, ...]
    label: Mark | None


@dataclass(frozen=True)
class Hint:
    """A vertical strip of the chart with a tooltip."""

    x: float
    width: float
    text: str


@dataclass(frozen=True)
class Plot:
    """A chart ready to draw: frame, ticks, curves and tooltips.

    `legend` pairs CSS classes with full names if a name does not fit at its line's end.
    """

    left: float
    top: float
    right: float
    bottom: float
    x_ticks: tuple[Mark, ...]
    y_ticks: tuple[Mark, ...]
    curves: tuple[Curve, ...]
    hints: tuple[Hint, ...]
    rule: Mark | None
    legend: tuple[tuple[str, str], ...]
    summary: str


def plot(chart: Chart) -> Plot:
    """Return the geometry of a chart; at least one of its lines must have a point."""
    lines = [line for line in chart.lines if line.points][:MAX_LINES]
    assert lines, f"{chart.title}: nothing to draw"
    # Downsample, so that the file stays small with many lines.
    lines = [replace(line, points=thin_points(line.points, _limit(len(lines)))) for line in lines]
    styles, labels = _looks(lines)
    x_axis, y_axis = _axes(chart, lines)
    left = 12 + _LETTER * max(len(text) for _, text in y_axis.ticks)
    named = max(map(len, labels))
    right = WIDTH - (8 + _BOLD * named if named else 12)
    bottom = HEIGHT - _BOTTOM

    def at(point: Point) -> Point:
        x, y = x_axis.place(point[0]), y_axis.place(point[1])
        return left + x * (right - left), bottom - y * (bottom - _TOP)

    # Labels at the ends of lines must not overlap, so they move apart vertically.
    ends = _spread(
        [at(line.points[-1])[1] if label else None for line, label in zip(lines, labels, strict=True)], bottom
    )
    return Plot(
        left,
        _TOP,
        right,
        bottom,
        tuple(Mark(at((value, y_axis.low))[0], bottom + 14, text) for value, text in x_axis.ticks),
        tuple(Mark(left - 6, at((x_axis.low, value))[1], text) for value, text in y_axis.ticks),
        tuple(
            Curve(
                style,
                line.name,
                tuple(" ".join(f"{x:.1f},{y:.1f}" for x, y in map(at, piece)) for piece in _pieces(chart, line)),
                tuple(Mark(*at(point), _hint(chart, [(line, point)])) for point in _dots(line)),
                tuple(Within(*at((x, low)), at((x, high))[1]) for (x, _), (low, high) in _bounds(chart, lines, line)),
                Mark(right + 6, end, label) if label else None,
            )
            for style, label, line, end in zip(styles, labels, lines, ends, strict=True)
        ),
        tuple(_hints(chart, lines, at, left, right)),
        Mark(left, at((x_axis.low, chart.rule[0]))[1], chart.rule[1]) if chart.rule else None,
        _legend(lines, styles),
        _summary(chart, lines),
    )


def _looks(lines: Sequence[Line]) -> tuple[list[str], list[str]]:
    """Return the CSS class of each line, and the label at its end ("" for none)."""
    if not _has_groups(lines):
        fits = all(_fits(line.name) for line in lines)
        labels = [_label(line.name, "" if fits else line.label) if len(lines) > 1 else "" for line in lines]
        return [f"line-{index}" for index in range(len(lines))], labels
    groups = list(dict.fromkeys(line.group for line in lines))
    first = {line.group: index for index, line in reversed(list(enumerate(lines)))}
    many = "line-group" if any(line.dashed for line in lines) else "line-many"
    fits = all(map(_fits, groups))
    labels = [
        _label(line.group, "" if fits else line.label) if first[line.group] == index and len(groups) > 1 else ""
        for index, line in enumerate(lines)
    ]
    styles = [f"{many} line-{groups.index(line.group) % NUM_DISTINCT}" for line in lines]
    return [f"{style} line-dashed" if line.dashed else style for style, line in zip(styles, lines, strict=True)], labels


def _has_groups(lines: Sequence[Line]) -> bool:
    return len(lines) > NUM_DISTINCT or any(line.dashed for line in lines)


def _legend(lines: Sequence[Line], styles: Sequence[str]) -> tuple[tuple[str, str], ...]:
    # No legend if all names fit at the ends of their lines.
    if len(lines) == 1:
        return ()
    has_groups = _has_groups(lines)
    named = {
        line.group if has_groups else line.name: style for line, style in reversed([*zip(lines, styles, strict=True)])
    }
    if all(_fits(name) for name in named) or (has_groups and len(named) == 1):
        return ()
    return tuple((style, clean(name)) for name, style in reversed(named.items()))


def _pieces(chart: Chart, line: Line) -> Iterable[Sequence[Point]]:
    # On a log axis, a long distance is no gap.
    return [line.points] if chart.log_x else pieces(line.points)


def _bounds(chart: Chart, lines: Sequence[Line], line: Line) -> Iterator[tuple[Point, tuple[float, float]]]:
    # An interval much longer than the range of all points would flatten them, so it is clipped.
    lowest, highest = _room(chart, [y for each in lines for _, y in each.points])
    for point in line.points:
        if point in line.bounds:
            low, high = line.bounds[point]
            yield point, (min(max(low, lowest), point[1]), max(min(high, highest), point[1]))


def _room(chart: Chart, ys: Sequence[float]) -> tuple[float, float]:
    # Twice the points' own range above and below, or a decade.
    if chart.log_y:
        return min(ys) / 10, max(ys) * 10
    base = min(ys) if chart.low is None else min(chart.low, *ys)
    apart = (max(ys) - base) or abs(base) or 1.0
    return base if chart.low is not None else base - 2 * apart, max(ys) + 2 * apart


def _limit(num_lines: int) -> int:
    return max(40, min(500, _POINTS_OF_ALL // num_lines // 2 * 2))


def _axes(chart: Chart, lines: Sequence[Line]) -> tuple[Axis, Axis]:
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points]
    ys += [bound for line in lines for _, bounds in _bounds(chart, lines, line) for bound in bounds]
    ys += [level for level in (chart.low, chart.high) if level is not None]
    if chart.rule is not None:
        ys.append(chart.rule[0])
    x_axis = doublings(min(xs), max(xs)) if chart.log_x else axis(min(0.0, *xs), max(xs), is_tight=True)
    return x_axis, decades(min(ys), max(ys)) if chart.log_y else axis(min(ys), max(ys), 4)


def _dots(line: Line) -> Sequence[Point]:
    # Markers of many points would hide the line; a single point needs one.
    return line.points if (line.marked and len(line.points) <= _NUM_HINTS) or len(line.points) == 1 else ()


def _spread(ends: Sequence[float | None], bottom: float) -> list[float]:
    order = sorted((end, index) for index, end in enumerate(ends) if end is not None)
    placed = dict.fromkeys(range(len(ends)), 0.0)
    above = _TOP - _LABEL
    for end, index in order:
        above = max(end, above + _LABEL)
        placed[index] = above
    below = bottom + _LABEL
    for _, index in reversed(order):
        below = min(placed[index], below - _LABEL)
        placed[index] = below
    return list(placed.values())


def _hints(
    chart: Chart, lines: Sequence[Line], at: Callable[[Point], Point], left: float, right: float
) -> Iterator[Hint]:
    plain = [line for line in lines if not _dots(line)][:NUM_DISTINCT]
    if not plain:
        return
    # Tooltips are strips between the points of the longest line.
    longest = max(plain, key=lambda line: len(line.points))
    every = -(-len(longest.points) // _NUM_HINTS)
    places = [(at(point)[0], point[0]) for point in longest.points[::every]]
    edges = [left, *((before[0] + after[0]) / 2 for before, after in pairwise(places)), right]
    for (begin, end), (_, x) in zip(pairwise(edges), places, strict=True):
        nearest = [(line, min(line.points, key=lambda point: abs(point[0] - x))) for line in plain]
        yield Hint(begin, end - begin, _hint(chart, nearest))


def _hint(chart: Chart, points: Sequence[tuple[Line, Point]]) -> str:
    values = (f"{line.name} {number(point[1], 4)}{_within(line, point)}" for line, point in points)
    return f"{chart.x_label} {number(points[0][1][0], 4)}: {', '.join(values)}"


def _within(line: Line, point: Point) -> str:
    low, high = line.bounds.get(point, (None, None))
    return "" if low is None or high is None else f" ({number(low, 4)} to {number(high, 4)})"


def _label(name: str, short: str) -> str:
    return clean(short or name, _LONGEST_LABEL)


def _fits(name: str) -> bool:
    return len(name) <= _LONGEST_LABEL


def _summary(chart: Chart, lines: Sequence[Line]) -> str:
    # For screen readers.
    ranges = (
        f"{line.name} from {number(line.points[0][1])} to {number(line.points[-1][1])}" for line in lines[:NUM_DISTINCT]
    )
    return f"{chart.title} ({chart.y_label}) over {chart.x_label}: {'; '.join(ranges)}"
