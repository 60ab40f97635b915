"""Downsample series, and split them at gaps."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean, median
from typing import Final

from paceline.report.text import finite_or_none

Point = tuple[float, float]
MAX_POINTS = 500
# A pause is a gap if it exceeds the median interval nearby, before and after, by this factor.
_GAP_FACTOR: Final = 5.0
_NUM_NEIGHBOURS: Final = 8


@dataclass(frozen=True)
class Extent:
    """Statistics over all records of a key, not only the points that remain."""

    lowest: float
    highest: float
    mean: float
    last: float


@dataclass(frozen=True)
class Series:
    """Points that are means of `per_point` records each; `extents` cover all `num_records`."""

    points: tuple[Mapping[str, float], ...] = ()
    extents: Mapping[str, Extent] = field(default_factory=dict)
    num_records: int = 0
    per_point: int = 1
    is_sample: bool = False  # the file was too long: the records are spread evenly over it

    def xy_points(self, x: str, y: str) -> tuple[Point, ...]:
        """Return `y` over `x` for the points that have both."""
        return tuple((point[x], point[y]) for point in self.points if x in point and y in point)

    def has_key(self, key: str) -> bool:
        """Return whether any record has `key`."""
        return key in self.extents


def downsample(records: Iterable[Mapping[str, object]], limit: int = MAX_POINTS) -> Series:
    """Return `records` as a series of at most `limit` points, ignoring values that are not finite numbers."""
    rows = [
        {key: value for key, raw in record.items() if (value := finite_or_none(raw)) is not None} for record in records
    ]
    per_point = 1
    while per_point * limit < len(rows):
        per_point *= 2
    points = tuple(_mean_row(rows[begin : begin + per_point]) for begin in range(0, len(rows), per_point))
    extents = {key: Extent(min(each), max(each), fmean(each), each[-1]) for key, each in _columns(rows).items()}
    return Series(points, extents, len(rows), per_point)


def _columns(rows: Iterable[Mapping[str, float]]) -> dict[str, list[float]]:
    values: dict[str, list[float]] = {}
    for row in rows:
        for key, value in row.items():
            values.setdefault(key, []).append(value)
    return values


def _mean_row(rows: Iterable[Mapping[str, float]]) -> dict[str, float]:
    return {key: fmean(each) for key, each in _columns(rows).items()}


def downsample_points(points: Iterable[Point], limit: int) -> tuple[Point, ...]:
    """Return a line as at most `limit` points."""
    return downsample(({"x": x, "y": y} for x, y in points), limit).xy_points("x", "y")


def split_at_gaps(points: Sequence[Point]) -> Iterator[Sequence[Point]]:
    """Yield the runs of points between gaps."""
    # Compare with nearby intervals only: the longer a run takes, the less often paceline samples its nodes.
    widths = [after[0] - before[0] for before, after in pairwise(points)]
    begin = 0
    for index, width in enumerate(widths):
        near = [
            each
            for each in (
                widths[max(0, index - _NUM_NEIGHBOURS) : index],
                widths[index + 1 : index + 1 + _NUM_NEIGHBOURS],
            )
            if each
        ]
        if len(widths) >= _NUM_NEIGHBOURS and width > _GAP_FACTOR * max(map(median, near)):
            yield points[begin : index + 1]
            begin = index + 1
    yield points[begin:]


def time_weighted_mean(points: Sequence[Point]) -> float:
    """Return the mean of the values, each weighted by the time since the previous point."""
    weighted = [
        (after[0] - before[0], after[1]) for piece in split_at_gaps(points) for before, after in pairwise(piece)
    ]
    whole = sum(width for width, _ in weighted)
    if whole > 0:
        return sum(width * value for width, value in weighted) / whole
    return sum(value for _, value in points) / len(points)  # a single point, or points at one time
