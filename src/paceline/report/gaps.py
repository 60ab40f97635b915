"""Split time series at gaps, and average them over time."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import median
from typing import Final

from paceline.report.thin import Point

# A pause is a gap if it exceeds the median interval nearby, before and after, by this factor.
_GAP_FACTOR: Final = 5.0
_NUM_NEIGHBOURS: Final = 8


def split_at_gaps(points: Sequence[Point]) -> Iterator[Sequence[Point]]:
    """Yield the runs of points between gaps, such as while the run was down."""
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
    """Return the mean of the values, each weighted by the time since the previous point; gaps do not count."""
    weighted = [
        (after[0] - before[0], after[1]) for piece in split_at_gaps(points) for before, after in pairwise(piece)
    ]
    whole = sum(width for width, _ in weighted)
    if whole > 0:
        return sum(width * value for width, value in weighted) / whole
    return sum(value for _, value in points) / len(points)  # a single point, or points at one time
