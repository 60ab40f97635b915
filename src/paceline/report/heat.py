"""Lay out a confusion matrix: labelled cells for a few classes, small cells for up to a hundred."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import sqrt

from paceline.core.units import share
from paceline.report.blocks import HeatMap
from paceline.report.words import clean

MAX_NAMED = 30
MAX_CELLS = 100
_NUM_LEVELS = 10
_FAINTEST = 0.25
_LETTER = 6.2
_LONGEST = 14


@dataclass(frozen=True)
class Square:
    """A nonzero cell: its corner, opacity (0 to 1), text and tooltip; `is_right` marks the diagonal."""

    x: float
    y: float
    level: float
    is_right: bool
    text: str
    hint: str


@dataclass(frozen=True)
class Shade:
    """All small cells of one opacity as one SVG path."""

    level: float
    is_right: bool
    path: str


@dataclass(frozen=True)
class Name:
    """A class name at its row and column; `at` is the center of both."""

    at: float
    text: str


@dataclass(frozen=True)
class Grid:
    """A heat map ready to draw; `left` and `top` are the margins of the names, which lean if they are long."""

    width: float
    height: float
    left: float
    top: float
    cell: float
    names: tuple[Name, ...]
    squares: tuple[Square, ...]
    shades: tuple[Shade, ...]
    leans: bool


def grid(heat: HeatMap) -> Grid:
    """Return the geometry of a confusion matrix of up to `MAX_CELLS` classes."""
    num = len(heat.names)
    assert 0 < num <= MAX_CELLS, num
    names = [clean(each, _LONGEST) for each in heat.names]
    if num > MAX_NAMED:
        cell, every = 6.0, 10
        ticks = tuple(Name(cell * (index + 0.5), str(index)) for index in range(0, num, every))
        return Grid(
            32 + cell * num, 24 + cell * num, 28.0, 20.0, cell, ticks, (), tuple(_shades(heat.counts, cell)), False
        )
    cell = 34.0 if num <= 12 else 22.0
    longest = _LETTER * max(len(each) for each in names)
    leans = longest > cell
    left, top = 16 + longest, 16 + 0.75 * longest if leans else 20.0
    ticks = tuple(Name(cell * (index + 0.5), each) for index, each in enumerate(names))
    width, height = left + cell * num + (0.6 * top if leans else 4.0), top + cell * num + 4
    return Grid(width, height, left, top, cell, ticks, tuple(_squares(heat, cell)), (), leans)


def _level(count: int, total: int) -> float:
    # The root keeps single mistakes visible.
    return _FAINTEST + (1 - _FAINTEST) * sqrt(count / total)


def _squares(heat: HeatMap, cell: float) -> Iterator[Square]:
    for row, counts in enumerate(heat.counts):
        for column, count in enumerate(counts):
            if count:
                fraction = f"{count:,} of {sum(counts):,}, {share(count / sum(counts))}"
                hint = f"{clean(heat.names[row], 60)} taken for {clean(heat.names[column], 60)}: {fraction}"
                text = f"{count:,}" if cell > 30 and count < 10_000 else ""
                level = _level(count, sum(counts))
                yield Square(column * cell, row * cell, level, row == column, text, hint)


def _shades(counts: Sequence[Sequence[int]], cell: float) -> Iterator[Shade]:
    # Ten paths take a tenth of the bytes of ten thousand squares.
    paths: dict[tuple[bool, int], list[str]] = {}
    for row, line in enumerate(counts):
        total = sum(line)
        for column, count in enumerate(line):
            if count:
                level = max(1, round(_NUM_LEVELS * _level(count, total)))
                corner = f"M{column * cell:g} {row * cell:g}h{cell:g}v{cell:g}h-{cell:g}z"
                paths.setdefault((row == column, level), []).append(corner)
    for (is_right, level), corners in sorted(paths.items()):
        yield Shade(level / _NUM_LEVELS, is_right, "".join(corners))
