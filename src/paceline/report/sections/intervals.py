"""Measurements as cells of a table, their intervals below them; and cells that may be empty."""

import shlex
from collections.abc import Callable, Sequence
from typing import Final

from paceline.core.interval import Interval
from paceline.core.units import accuracy, number, seconds, share
from paceline.report.blocks import Cell
from paceline.report.words import clean

NOTHING: Final = Cell("")
_LONGEST: Final = 400


def of_rate(found: Interval | None) -> Cell:
    """Return images/s, such as `1,234` and `1,200 to 1,260`."""
    if found is None:
        return NOTHING
    return Cell(rate(found.value), found.value, note=_bounds(found, rate))


def of_ratio(found: Interval | None) -> Cell:
    """Return how many times as fast, such as `1.23x` and `1.19 to 1.28`."""
    if found is None:
        return NOTHING
    return Cell(f"{found.value:,.2f}x", found.value, note=_bounds(found, lambda each: f"{each:,.2f}"))


def of_change(found: Interval | None) -> Cell:
    """Return a relative difference, such as `-0.3 %` and `-1.1 to +0.5`."""
    if found is None:
        return NOTHING
    return Cell(f"{100 * found.value:+.2f} %", found.value, note=_bounds(found, lambda each: f"{100 * each:+.2f}"))


def of_share(found: Interval | None) -> Cell:
    """Return a share, such as `93.1 %` and `92.0 to 94.2`."""
    if found is None:
        return NOTHING
    return Cell(share(found.value), found.value, note=_bounds(found, lambda each: f"{100 * each:.1f}"))


def of_accuracy(found: Interval | None) -> Cell:
    """Return an accuracy, such as `93.12 %` and `92.95 to 93.29`."""
    if found is None:
        return NOTHING
    return Cell(accuracy(found.value), found.value, note=_bounds(found, lambda each: f"{100 * each:.2f}"))


def of_points(found: Interval | None) -> Cell:
    """Return a difference of accuracies, such as `-0.31 points` and `-1.12 to +0.50`."""
    if found is None:
        return NOTHING
    return Cell(f"{100 * found.value:+.2f} points", found.value, note=_bounds(found, lambda each: f"{100 * each:+.2f}"))


def of_seconds(found: Interval | None) -> Cell:
    """Return a time, such as `12.3 s` and `11.9 s to 12.7 s`."""
    if found is None:
        return NOTHING
    return Cell(seconds(found.value), found.value, note=_bounds(found, seconds))


def of_number(found: Interval | None) -> Cell:
    """Return any other number, such as `12.3` and `11.9 to 12.7`."""
    if found is None:
        return NOTHING
    return Cell(number(found.value), found.value, note=_bounds(found, number))


def rate(images_per_s: float) -> str:
    """Return images/s with three digits, as text; what stands behind the point of a thousand is noise."""
    return f"{images_per_s:,.0f}" if images_per_s >= 1000 else number(images_per_s)


def between(low: str, high: str) -> str:
    """Return what stands behind a number, in a sentence, whose interval is known."""
    return f" ({low} to {high})"


def words(patch: Sequence[str], nothing: str = "") -> Cell:
    """Return `KEY=VALUE` words as code to paste; `nothing` in words where there are none."""
    text = shlex.join(patch)
    return Cell(clean(text, _LONGEST), is_code=True) if text else Cell(nothing)


def sentence(text: str) -> Cell:
    """Return words from outside, on one line, that may be long."""
    return Cell(clean(text, _LONGEST))


def maybe_seconds(value_s: float | None) -> Cell:
    """Return seconds in the unit that fits; nothing where they were not measured."""
    return NOTHING if value_s is None else Cell(seconds(value_s), value_s)


def maybe_share(value: float | None) -> Cell:
    """Return a share; nothing where it was not measured."""
    return NOTHING if value is None else Cell(share(value), value)


def _bounds(found: Interval, told: Callable[[float], str]) -> str:
    if found.low is None or found.high is None:
        return ""
    return f"{told(found.low)} to {told(found.high)}"
