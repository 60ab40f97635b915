"""Where a curve over time has a gap, as a run was down; and its mean over time, as looks need not be evenly spaced."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import median
from typing import Final

from paceline.report.thin import Point

_GAP: Final = 5.0
"""A pause of so many times the usual one nearby, before it and after it, is a gap."""
_NEAR: Final = 8


def pieces(points: Sequence[Point]) -> Iterator[Sequence[Point]]:
    """Yield the unbroken pieces of a line: a run that was down for a while has no values in between.

    What is usual is judged nearby, as the longer a run goes on the less often its nodes are looked at.
    """
    widths = [after[0] - before[0] for before, after in pairwise(points)]
    begin = 0
    for index, width in enumerate(widths):
        near = [each for each in (widths[max(0, index - _NEAR) : index], widths[index + 1 : index + 1 + _NEAR]) if each]
        if len(widths) >= _NEAR and width > _GAP * max(map(median, near)):
            yield points[begin : index + 1]
            begin = index + 1
    yield points[begin:]


def mean_over_time(points: Sequence[Point]) -> float:
    """Return the mean of the values, each for the time since the one before; gaps are left out.

    Values of points that take no time, as there is only one, count alike.
    """
    weighted = [(after[0] - before[0], after[1]) for piece in pieces(points) for before, after in pairwise(piece)]
    whole = sum(width for width, _ in weighted)
    if whole > 0:
        return sum(width * value for width, value in weighted) / whole
    return sum(value for _, value in points) / len(points)
