"""Series of any length as at most a few hundred points, in one pass and bounded memory."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from paceline.report.words import finite

Point = tuple[float, float]
MAX_POINTS = 500


@dataclass(frozen=True)
class Extent:
    """Of all records of one key, not only the points that are kept: lowest, highest, mean and last value."""

    lowest: float
    highest: float
    mean: float
    last: float


@dataclass(frozen=True)
class Series:
    """`points` are means of `per_point` records each, by key; `extents` are of all `num_records` records."""

    points: tuple[Mapping[str, float], ...] = ()
    extents: Mapping[str, Extent] = field(default_factory=dict)
    num_records: int = 0
    per_point: int = 1

    def line(self, x: str, y: str) -> tuple[Point, ...]:
        """Return `y` over `x`, where both are known."""
        return tuple((point[x], point[y]) for point in self.points if x in point and y in point)

    def has(self, key: str) -> bool:
        """Whether any record has `key`."""
        return key in self.extents


class Thinner:
    """Take records one by one; where there would be more than `limit` points, neighbours become their mean."""

    def __init__(self, limit: int = MAX_POINTS) -> None:
        assert limit % 2 == 0, limit
        self._limit = limit
        self._per_point = 1
        self._num_records = 0
        self._points: list[_Sums] = []
        self._open = _Sums()
        self._total = _Sums()
        self._lowest: dict[str, float] = {}
        self._highest: dict[str, float] = {}
        self._last: dict[str, float] = {}

    def add(self, record: Mapping[str, object]) -> None:
        """Take a record; values that are no finite numbers are left out."""
        if len(self._points) == self._limit and not self._open.records:
            self._halve()
        found = ((key, finite(value)) for key, value in record.items())
        values = {key: value for key, value in found if value is not None}
        self._num_records += 1
        for key, value in values.items():
            self._lowest[key] = min(value, self._lowest.get(key, value))
            self._highest[key] = max(value, self._highest.get(key, value))
        self._last.update(values)
        single = _Sums.of(values)
        self._total.add(single)
        self._open.add(single)
        self._open.records += 1
        if self._open.records == self._per_point:
            self._points.append(self._open)
            self._open = _Sums()

    def series(self) -> Series:
        """Return what there is so far."""
        points = [*self._points, self._open] if self._open.records else self._points
        means = self._total.means()
        extents = {key: Extent(self._lowest[key], self._highest[key], means[key], self._last[key]) for key in means}
        return Series(tuple(point.means() for point in points), extents, self._num_records, self._per_point)

    def _halve(self) -> None:
        for left, right in zip(self._points[::2], self._points[1::2], strict=True):
            left.add(right)
        self._points = self._points[::2]
        self._per_point *= 2


class _Sums:
    """Sums by key, how many values each has, and how many records they are from."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}
        self.counts: dict[str, int] = {}
        self.records = 0

    @classmethod
    def of(cls, values: Mapping[str, float]) -> "_Sums":
        single = cls()
        single.sums = dict(values)
        single.counts = dict.fromkeys(values, 1)
        return single

    def add(self, other: "_Sums") -> None:
        for key, value in other.sums.items():
            self.sums[key] = self.sums.get(key, 0.0) + value
            self.counts[key] = self.counts.get(key, 0) + other.counts[key]

    def means(self) -> dict[str, float]:
        return {key: value / self.counts[key] for key, value in self.sums.items()}


def thin(records: Iterable[Mapping[str, object]], limit: int = MAX_POINTS) -> Series:
    """Return `records` as a series of at most `limit` points (an even number)."""
    thinner = Thinner(limit)
    for record in records:
        thinner.add(record)
    return thinner.series()


def thin_points(points: Iterable[Point], limit: int) -> tuple[Point, ...]:
    """Return a line as at most `limit` points (an even number)."""
    return thin(({"x": x, "y": y} for x, y in points), limit).line("x", "y")
