"""Downsample series of any length in one pass and bounded memory, and split them at gaps."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Final

from paceline.report.text import finite_or_none

Point = tuple[float, float]
MAX_POINTS = 500
# Sum and number of values by key.
_Sums = dict[str, tuple[float, int]]
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


class Downsampler:
    """Collect records one by one; above `limit` points, average neighbours pairwise."""

    def __init__(self, limit: int = MAX_POINTS) -> None:
        # Halving merges points in pairs.
        assert limit % 2 == 0, limit
        self._limit = limit
        self._per_point = 1
        self._num_records = 0
        self._points: list[_Sums] = []
        self._open: _Sums = {}
        self._num_open = 0
        self._seen: dict[str, list[float]] = {}  # lowest, highest, last

    def add(self, record: Mapping[str, object]) -> None:
        """Add a record, ignoring values that are not finite numbers."""
        if len(self._points) == self._limit and not self._num_open:  # full: halve the resolution
            self._halve()
        for key, raw in record.items():
            value = finite_or_none(raw)
            if value is None:
                continue
            _add_value(self._open, key, value, 1)
            seen = self._seen.setdefault(key, [value, value, value])
            seen[:] = min(value, seen[0]), max(value, seen[1]), value
        self._num_records += 1
        self._num_open += 1
        if self._num_open == self._per_point:
            self._points.append(self._open)
            self._open, self._num_open = {}, 0

    def series(self) -> Series:
        """Return the series of all records added so far."""
        points = [*self._points, self._open] if self._num_open else self._points
        whole: _Sums = {}
        for each in points:
            _merge_sums(whole, each)
        means = _mean_values(whole)
        extents = {
            key: Extent(lowest, highest, means[key], last) for key, (lowest, highest, last) in self._seen.items()
        }
        return Series(tuple(map(_mean_values, points)), extents, self._num_records, self._per_point)

    def _halve(self) -> None:
        for left, right in zip(self._points[::2], self._points[1::2], strict=True):
            _merge_sums(left, right)
        self._points = self._points[::2]
        self._per_point *= 2


def _add_value(sums: _Sums, key: str, value: float, number: int) -> None:
    before, num_before = sums.get(key, (0.0, 0))
    sums[key] = (before + value, num_before + number)


def _merge_sums(sums: _Sums, others: _Sums) -> None:
    for key, (value, number) in others.items():
        _add_value(sums, key, value, number)


def _mean_values(sums: _Sums) -> dict[str, float]:
    return {key: value / number for key, (value, number) in sums.items()}


def downsample(records: Iterable[Mapping[str, object]], limit: int = MAX_POINTS) -> Series:
    """Return `records` as a series of at most `limit` points (an even number)."""
    downsampler = Downsampler(limit)
    for record in records:
        downsampler.add(record)
    return downsampler.series()


def downsample_points(points: Iterable[Point], limit: int) -> tuple[Point, ...]:
    """Return a line as at most `limit` points (an even number)."""
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
