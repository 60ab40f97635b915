"""Lay out a confusion matrix: labelled cells for a few classes, small cells for up to a hundred."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import sqrt

from paceline.core.units import share
from paceline.report.blocks import HeatMap
from paceline.report.words import clean_text

MAX_NAMED_CLASSES = 30
MAX_MATRIX_CLASSES = 100
_NUM_LEVELS = 10
_MIN_OPACITY = 0.25
_NAME_CHAR_WIDTH = 6.2
_MAX_NAME_CHARS = 14


@dataclass(frozen=True)
class HeatMapSquare:
    """A nonzero cell: its corner, opacity (0 to 1), text and tooltip; `is_right` marks the diagonal."""

    x: float
    y: float
    level: float
    is_right: bool
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
    """A heat map ready to draw; `left` and `top` are the margins of the names, which lean if they are long."""

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
            32 + cell * num,
            24 + cell * num,
            28.0,
            20.0,
            cell,
            ticks,
            (),
            tuple(_build_shades(heat.counts, cell)),
            False,
        )
    cell = 34.0 if num <= 12 else 22.0
    longest = _NAME_CHAR_WIDTH * max(len(each) for each in names)
    leans = longest > cell
    left, top = 16 + longest, 16 + 0.75 * longest if leans else 20.0
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
