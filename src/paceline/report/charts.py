"""Lay out charts and confusion matrices as SVG geometry; the templates draw it."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import sqrt

from paceline.core.units import number, share
from paceline.report.document import Chart, ChartLine, HeatMap
from paceline.report.series import Point, downsample_points, split_at_gaps
from paceline.report.text import clean_text

# All lengths are in SVG units, which are CSS pixels at the natural size.
WIDTH, HEIGHT = 440.0, 240.0
MAX_LINES = 32
# Margins above and below, widths of a letter and of a bold one, height of a label.
_TOP, _BOTTOM, _LETTER, _BOLD, _LABEL = 22.0, 38.0, 7.2, 8.6, 14.0
_MAX_TOTAL_POINTS = 2000  # over all lines of a chart
NUM_LINE_STYLES = 4  # colors that page.css distinguishes
_MAX_LABEL_CHARS = 14
_MAX_TOOLTIPS = 60
MAX_NAMED_CLASSES = 30  # a matrix of more numbers its classes
MAX_MATRIX_CLASSES = 100
_NUM_LEVELS = 10  # of opacity, in a matrix that is drawn as one path per level
_MIN_OPACITY = 0.25  # below this, a cell looks empty
_NAME_CHAR_WIDTH = 6.2
_AXIS_TITLE = 14.0  # margin of an axis title of a heat map
_MAX_NAME_CHARS = 14
_MIN_COUNT = 0.01  # a log axis that begins below it shows no counts


@dataclass(frozen=True)
class Axis:
    """An axis with the value and text of each tick; `scale` maps values to a linear scale."""

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    scale: Callable[[float], float] = field(default=float)

    def position(self, value: float) -> float:
        """Return the position of `value`, from 0 at `low` to 1 at `high`."""
        low, high = self.scale(self.low), self.scale(self.high)
        return (self.scale(value) - low) / (high - low)


def linear_axis(low: float, high: float, num_ticks: int = 5, *, is_tight: bool = False) -> Axis:
    """Return an axis with about `num_ticks` ticks at 1, 2 or 5 times a power of ten.

    A tight axis ends at the values instead of at ticks.
    """
    if not high - low > 1e-300:  # below this, a tenth of it underflows to 0 and has no logarithm
        around = abs(low) if abs(low) > 1e-300 else 1.0
        low, high = (low, low + around) if low >= 0 else (low - around, low)
    step = _nice_step((high - low) / num_ticks)
    # 1e-9: a quotient that is whole up to rounding must not add a tick.
    first = math.ceil(low / step - 1e-9) if is_tight else math.floor(low / step + 1e-9)
    last = math.floor(high / step + 1e-9) if is_tight else math.ceil(high / step - 1e-9)
    ticks = [index * step for index in range(first, last + 1)]
    text = _tick_formatter(step, max(abs(low), abs(high)))
    ends = (low, high) if is_tight else (ticks[0], ticks[-1])
    return Axis(*ends, tuple((tick, text(tick)) for tick in ticks))


def log2_axis(low: float, high: float, num_ticks: int = 7) -> Axis:
    """Return a log axis over positive values with at most `num_ticks` ticks at powers of two.

    With fewer than two powers of two in range, the ticks are at both ends.
    """
    if not high > low:
        # Center a single value with its own tick alone: half a rank is meaningless.
        return Axis(low / 2, low * 2, ((low, _format_power(low)),), math.log)
    first, last = math.ceil(math.log2(low) - 1e-9), math.floor(math.log2(high) + 1e-9)
    every = max(1, -(-(last - first + 1) // num_ticks))
    ticks = [2.0**power for power in range(first, last + 1, every)]
    ticks = ticks if len(ticks) > 1 else [low, high]
    return Axis(low, high, tuple((tick, _format_power(tick)) for tick in ticks), math.log)


def log10_axis(low: float, high: float, num_ticks: int = 5) -> Axis:
    """Return a log axis over positive values that ends at ticks."""
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    # Ticks at 1, 2 and 5 times a power of ten if these fit, else at powers.
    for nice in ((1.0, 2.0, 5.0), (1.0,)):
        ticks = [each * 10.0**power for power in range(first, last + 1) for each in nice]
        begin = max(index for index, tick in enumerate(ticks) if index == 0 or tick <= low * (1 + 1e-9))
        end = min(index for index, tick in enumerate(ticks) if index == len(ticks) - 1 or tick >= high * (1 - 1e-9))
        ticks = ticks[begin : max(end, begin + 1) + 1]
        if len(ticks) <= num_ticks + 1:
            break
    ticks = ticks[:: max(1, (len(ticks) - 1) // num_ticks)] if len(ticks) > 2 * num_ticks else ticks
    return Axis(
        min(ticks[0], low), max(ticks[-1], high), tuple((tick, _format_power(tick)) for tick in ticks), math.log
    )


def _format_power(value: float) -> str:
    return f"{value:,.0f}" if 1 <= value < 1e7 else f"{value:.3g}".replace("e-0", "e-").replace("e+0", "e")


def _nice_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next(nice * power for nice in (1.0, 2.0, 5.0, 10.0) if nice * power >= rough * (1 - 1e-9))


def _tick_formatter(step: float, largest: float) -> Callable[[float], str]:
    # As many decimals as distinguish ticks, or exponents for long numbers.
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    if decimals > 4 or largest >= 1e7:
        return lambda value: f"{value:.3g}".replace("e-0", "e-").replace("e+0", "e") if value else "0"
    return lambda value: f"{value + 0.0:,.{decimals}f}"


@dataclass(frozen=True)
class TextMark:
    """A text at a position."""

    x: float
    y: float
    text: str


@dataclass(frozen=True)
class ErrorBar:
    """The vertical extent of an interval at `x`."""

    x: float
    low: float
    high: float


@dataclass(frozen=True)
class PlotCurve:
    """A line: its CSS class, unbroken pieces as SVG points, markers, error bars, and the label at its end."""

    style: str
    name: str
    pieces: tuple[str, ...]
    dots: tuple[TextMark, ...]
    bars: tuple[ErrorBar, ...]
    label: TextMark | None


@dataclass(frozen=True)
class Tooltip:
    """A vertical strip of the chart with a tooltip."""

    x: float
    width: float
    text: str


@dataclass(frozen=True)
class ChartGeometry:
    """A chart ready to draw.

    `legend` pairs CSS classes with names that do not fit at the ends of their lines.
    """

    left: float
    top: float
    right: float
    bottom: float
    x_ticks: tuple[TextMark, ...]
    y_ticks: tuple[TextMark, ...]
    curves: tuple[PlotCurve, ...]
    hints: tuple[Tooltip, ...]
    rule: TextMark | None
    legend: tuple[tuple[str, str], ...]
    summary: str
    best: TextMark | None
    script_data: str


def layout_chart(chart: Chart) -> ChartGeometry:
    """Return the geometry of a chart; at least one of its lines must have a point."""
    lines = [line for line in chart.lines if line.points][:MAX_LINES]
    assert lines, f"{chart.title}: nothing to draw"
    # Downsample, so that the file stays small with many lines.
    lines = [replace(line, points=downsample_points(line.points, _max_points(len(lines)))) for line in lines]
    styles, labels = _line_styles(lines)
    x_axis, y_axis = _build_axes(chart, lines)
    left = 12 + _LETTER * max(len(text) for _, text in y_axis.ticks)
    named = max(map(len, labels))
    right = WIDTH - (8 + _BOLD * named if named else 12)
    bottom = HEIGHT - _BOTTOM

    def at(point: Point) -> Point:
        x, y = x_axis.position(point[0]), y_axis.position(point[1])
        return left + x * (right - left), bottom - y * (bottom - _TOP)

    # Labels at the ends of lines must not overlap, so they move apart vertically.
    ends = _spread_labels(
        [at(line.points[-1])[1] if label else None for line, label in zip(lines, labels, strict=True)], bottom
    )
    return ChartGeometry(
        left,
        _TOP,
        right,
        bottom,
        tuple(TextMark(at((value, y_axis.low))[0], bottom + 14, text) for value, text in x_axis.ticks),
        tuple(TextMark(left - 6, at((x_axis.low, value))[1], text) for value, text in y_axis.ticks),
        tuple(
            PlotCurve(
                style,
                line.name,
                tuple(
                    " ".join(f"{x:.1f},{y:.1f}" for x, y in map(at, piece)) for piece in _unbroken_pieces(chart, line)
                ),
                tuple(TextMark(*at(point), _tooltip_text(chart, [(line, point)])) for point in _marked_points(line)),
                tuple(
                    ErrorBar(*at((x, low)), at((x, high))[1])
                    for (x, _), (low, high) in _clipped_bounds(chart, lines, line)
                ),
                TextMark(right + 6, end, label) if label else None,
            )
            for style, label, line, end in zip(styles, labels, lines, ends, strict=True)
        ),
        tuple(_build_tooltips(chart, lines, at, left, right)),
        _place_rule(chart, lines, at, (left, right)),
        _build_legend(lines, styles),
        _describe_chart(chart, lines),
        TextMark(*at(chart.best[0]), chart.best[1]) if chart.best else None,
        _script_data(chart, lines, x_axis, (left, right, bottom)),
    )


def _place_rule(
    chart: Chart, lines: Sequence[ChartLine], at: Callable[[Point], Point], edges: Point
) -> TextMark | None:
    """Return where the text of the rule begins at the left edge, or ends at the right one if that is emptier."""
    if chart.rule is None:
        return None
    level, text = chart.rule
    left, right = edges
    y = at((lines[0].points[0][0], level))[1]
    near = (right - left) / 4
    points = [at(point) for line in lines for point in line.points]
    # The text is above the rule. The label of the y axis is above the chart, at its left.
    begins = [_TOP - _LABEL, *(each for x, each in points if x <= left + near)]
    ends = [each for x, each in points if x >= right - near]
    apart = [min((abs(each - (y - 9)) for each in some), default=HEIGHT) for some in (begins, ends)]
    return TextMark(left + 4 if apart[0] >= min(apart[1], _LABEL) else right - 4, y, text)


def _script_data(chart: Chart, lines: Sequence[ChartLine], x_axis: Axis, edges: tuple[float, float, float]) -> str:
    """Return what page.js needs to read values off the chart, as JSON."""
    left, right, bottom = (round(each, 1) for each in edges)
    data = {
        "left": left,
        "right": right,
        "top": _TOP,
        "bottom": bottom,
        "x": [x_axis.low, x_axis.high],
        "logX": chart.log_x,
        "lines": [{"name": clean_text(line.name), "points": [*map(_shorten, line.points)]} for line in lines],
    }
    if chart.x_units:
        data["units"] = {name: [*map(_shorten, points)] for name, points in chart.x_units.items()}
    return json.dumps(data, separators=(",", ":"))


def _shorten(point: Point) -> Point:
    return float(f"{point[0]:.5g}"), float(f"{point[1]:.5g}")


def _line_styles(lines: Sequence[ChartLine]) -> tuple[list[str], list[str]]:
    """Return the CSS class and the end label ("" for none) of each line."""
    if not _is_grouped(lines):
        fits = all(_fits_label(line.name) for line in lines)
        labels = [_end_label(line.name, "" if fits else line.label) if len(lines) > 1 else "" for line in lines]
        return [f"line-{index}" for index in range(len(lines))], labels
    group_of = _group_names(lines)
    groups = list(dict.fromkeys(group_of))
    first = {group: index for index, group in reversed(list(enumerate(group_of)))}
    many = "line-group" if any(line.is_dashed for line in lines) else "line-many"
    fits = all(map(_fits_label, groups))
    labels = [
        _end_label(group, "" if fits else line.label) if first[group] == index and len(groups) > 1 else ""
        for index, (group, line) in enumerate(zip(group_of, lines, strict=True))
    ]
    styles = [f"{many} line-{groups.index(group) % NUM_LINE_STYLES}" for group in group_of]
    return [
        f"{style} line-dashed" if line.is_dashed else style for style, line in zip(styles, lines, strict=True)
    ], labels


def _is_grouped(lines: Sequence[ChartLine]) -> bool:
    return len(lines) > NUM_LINE_STYLES or any(line.is_dashed for line in lines)


def _group_names(lines: Sequence[ChartLine]) -> list[str]:
    """Return the group of each line; of a few lines, one without a group is a group of its own."""
    return [line.group or (line.name if len(lines) <= NUM_LINE_STYLES else "") for line in lines]


def _build_legend(lines: Sequence[ChartLine], styles: Sequence[str]) -> tuple[tuple[str, str], ...]:
    # No legend if all names fit at the ends of their lines.
    if len(lines) == 1:
        return ()
    has_groups = _is_grouped(lines)
    names = _group_names(lines) if has_groups else [line.name for line in lines]
    named = dict(reversed([*zip(names, styles, strict=True)]))
    if all(_fits_label(name) for name in named) or (has_groups and len(named) == 1):
        return ()
    return tuple((style, clean_text(name)) for name, style in reversed(named.items()))


def _unbroken_pieces(chart: Chart, line: ChartLine) -> Iterable[Sequence[Point]]:
    # On a log axis, a long distance is no gap.
    return [line.points] if chart.log_x else split_at_gaps(line.points)


def _clipped_bounds(
    chart: Chart, lines: Sequence[ChartLine], line: ChartLine
) -> Iterator[tuple[Point, tuple[float, float]]]:
    # An interval much longer than the range of all points would flatten them, so it is clipped.
    lowest, highest = _bounds_range(chart, [y for each in lines for _, y in each.points])
    for point in line.points:
        if point in line.bounds:
            low, high = line.bounds[point]
            yield point, (min(max(low, lowest), point[1]), max(min(high, highest), point[1]))


def _bounds_range(chart: Chart, ys: Sequence[float]) -> tuple[float, float]:
    # Twice the points' own range above and below, or a decade.
    if chart.log_y:
        return min(ys) / 10, max(ys) * 10
    base = min(ys) if chart.low is None else min(chart.low, *ys)
    apart = (max(ys) - base) or abs(base) or 1.0
    return base if chart.low is not None else base - 2 * apart, max(ys) + 2 * apart


def _max_points(num_lines: int) -> int:
    return max(40, min(500, _MAX_TOTAL_POINTS // num_lines // 2 * 2))


def _build_axes(chart: Chart, lines: Sequence[ChartLine]) -> tuple[Axis, Axis]:
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points]
    ys += [bound for line in lines for _, bounds in _clipped_bounds(chart, lines, line) for bound in bounds]
    ys += [level for level in (chart.low, chart.high) if level is not None]
    if chart.rule is not None:
        ys.append(chart.rule[0])
    # Counts, such as of ranks, double; learning rates rise by powers of ten.
    log_axis = log2_axis if min(xs) >= _MIN_COUNT else log10_axis
    x_axis = log_axis(min(xs), max(xs)) if chart.log_x else linear_axis(min(0.0, *xs), max(xs), is_tight=True)
    return x_axis, log10_axis(min(ys), max(ys)) if chart.log_y else linear_axis(min(ys), max(ys), 4)


def _marked_points(line: ChartLine) -> Sequence[Point]:
    # Markers of many points would hide the line; a single point needs one.
    return line.points if (line.has_markers and len(line.points) <= _MAX_TOOLTIPS) or len(line.points) == 1 else ()


def _spread_labels(ends: Sequence[float | None], bottom: float) -> list[float]:
    order = sorted((end, index) for index, end in enumerate(ends) if end is not None)
    placed = dict.fromkeys(range(len(ends)), 0.0)
    # Down first, then up from the bottom edge: neighbors are a label apart either way.
    above = _TOP - _LABEL
    for end, index in order:
        above = max(end, above + _LABEL)
        placed[index] = above
    below = bottom + _LABEL
    for _, index in reversed(order):
        below = min(placed[index], below - _LABEL)
        placed[index] = below
    return list(placed.values())


def _build_tooltips(
    chart: Chart, lines: Sequence[ChartLine], at: Callable[[Point], Point], left: float, right: float
) -> Iterator[Tooltip]:
    plain = [line for line in lines if not _marked_points(line)][:NUM_LINE_STYLES]
    if not plain:
        return
    # Tooltips are strips between the points of the longest line.
    longest = max(plain, key=lambda line: len(line.points))
    every = -(-len(longest.points) // _MAX_TOOLTIPS)
    places = [(at(point)[0], point[0]) for point in longest.points[::every]]
    edges = [left, *((before[0] + after[0]) / 2 for before, after in pairwise(places)), right]
    for (begin, end), (_, x) in zip(pairwise(edges), places, strict=True):
        nearest = [(line, min(line.points, key=lambda point: abs(point[0] - x))) for line in plain]
        yield Tooltip(begin, end - begin, _tooltip_text(chart, nearest))


def _tooltip_text(chart: Chart, points: Sequence[tuple[ChartLine, Point]]) -> str:
    values = (f"{line.name} {number(point[1], 4)}{_format_bounds(line, point)}" for line, point in points)
    return f"{chart.x_label} {number(points[0][1][0], 4)}: {', '.join(values)}"


def _format_bounds(line: ChartLine, point: Point) -> str:
    low, high = line.bounds.get(point, (None, None))
    return "" if low is None or high is None else f" ({number(low, 4)} to {number(high, 4)})"


def _end_label(name: str, short: str) -> str:
    return clean_text(short or name, _MAX_LABEL_CHARS)


def _fits_label(name: str) -> bool:
    return len(name) <= _MAX_LABEL_CHARS


def _describe_chart(chart: Chart, lines: Sequence[ChartLine]) -> str:
    # For screen readers.
    ranges = (
        f"{line.name} from {number(line.points[0][1])} to {number(line.points[-1][1])}"
        for line in lines[:NUM_LINE_STYLES]
    )
    return f"{chart.title} ({chart.y_label}) over {chart.x_label}: {'; '.join(ranges)}"


def spark_points(points: Sequence[Point]) -> str:
    """Return the points of a sparkline 100 wide and 24 high, as SVG; "" for fewer than two points."""
    if len(points) < 2:
        return ""
    xs, ys = [x for x, _ in points], [y for _, y in points]
    width, height = (max(xs) - min(xs)) or 1.0, (max(ys) - min(ys)) or 1.0
    return " ".join(f"{100 * (x - min(xs)) / width:.1f},{22 - 20 * (y - min(ys)) / height:.1f}" for x, y in points)


@dataclass(frozen=True)
class HeatMapSquare:
    """A nonzero cell: its corner, opacity (0 to 1), text and tooltip."""

    x: float
    y: float
    level: float
    is_right: bool  # on the diagonal
    text: str
    hint: str


@dataclass(frozen=True)
class HeatMapShade:
    """All small cells of one opacity as one SVG path."""

    level: float
    is_right: bool
    path: str


@dataclass(frozen=True)
class ClassTick:
    """A class name at its row and column; `at` is the center of both."""

    at: float
    text: str


@dataclass(frozen=True)
class HeatMapGeometry:
    """A heat map ready to draw; `left` and `top` are margins of axis titles and names, which lean if long."""

    width: float
    height: float
    left: float
    top: float
    cell: float
    names: tuple[ClassTick, ...]
    squares: tuple[HeatMapSquare, ...]
    shades: tuple[HeatMapShade, ...]
    leans: bool


def layout_heat_map(heat: HeatMap) -> HeatMapGeometry:
    """Return the geometry of a confusion matrix of up to `MAX_MATRIX_CLASSES` classes."""
    num = len(heat.names)
    assert 0 < num <= MAX_MATRIX_CLASSES, num
    names = [clean_text(each, _MAX_NAME_CHARS) for each in heat.names]
    if num > MAX_NAMED_CLASSES:
        cell, every = 6.0, 10
        ticks = tuple(ClassTick(cell * (index + 0.5), str(index)) for index in range(0, num, every))
        return HeatMapGeometry(
            32 + _AXIS_TITLE + cell * num,
            24 + _AXIS_TITLE + cell * num,
            28.0 + _AXIS_TITLE,
            20.0 + _AXIS_TITLE,
            cell,
            ticks,
            (),
            tuple(_build_shades(heat.counts, cell)),
            False,
        )
    cell = 34.0 if num <= 12 else 22.0
    longest = _NAME_CHAR_WIDTH * max(len(each) for each in names)
    leans = longest > cell
    left, top = 16 + longest + _AXIS_TITLE, (16 + 0.75 * longest if leans else 20.0) + _AXIS_TITLE
    ticks = tuple(ClassTick(cell * (index + 0.5), each) for index, each in enumerate(names))
    width, height = left + cell * num + (0.6 * top if leans else 4.0), top + cell * num + 4
    return HeatMapGeometry(width, height, left, top, cell, ticks, tuple(_build_squares(heat, cell)), (), leans)


def _opacity(count: int, total: int) -> float:
    # The root keeps single mistakes visible.
    return _MIN_OPACITY + (1 - _MIN_OPACITY) * sqrt(count / total)


def _build_squares(heat: HeatMap, cell: float) -> Iterator[HeatMapSquare]:
    for row, counts in enumerate(heat.counts):
        for column, count in enumerate(counts):
            if count:
                fraction = f"{count:,} of {sum(counts):,}, {share(count / sum(counts))}"
                hint = f"{clean_text(heat.names[row], 60)} taken for {clean_text(heat.names[column], 60)}: {fraction}"
                text = f"{count:,}" if cell > 30 and count < 10_000 else ""
                level = _opacity(count, sum(counts))
                yield HeatMapSquare(column * cell, row * cell, level, row == column, text, hint)


def _build_shades(counts: Sequence[Sequence[int]], cell: float) -> Iterator[HeatMapShade]:
    # Ten paths take a tenth of the bytes of ten thousand squares.
    paths: dict[tuple[bool, int], list[str]] = {}
    for row, line in enumerate(counts):
        total = sum(line)
        for column, count in enumerate(line):
            if count:
                level = max(1, round(_NUM_LEVELS * _opacity(count, total)))
                corner = f"M{column * cell:g} {row * cell:g}h{cell:g}v{cell:g}h-{cell:g}z"
                paths.setdefault((row == column, level), []).append(corner)
    for (is_right, level), corners in sorted(paths.items()):
        yield HeatMapShade(level / _NUM_LEVELS, is_right, "".join(corners))
