"""Format intervals as table cells (empty for None), the bounds below the value."""

import shlex
from collections.abc import Callable, Sequence
from typing import Final

from paceline.core.interval import Interval
from paceline.core.units import accuracy, number, seconds, share
from paceline.report.blocks import Cell
from paceline.report.words import clean

NOTHING: Final = Cell("")
_LONGEST: Final = 400


def of_rate(interval: Interval | None) -> Cell:
    """Return a rate in images/s, such as `1,234` and `1,200 to 1,260`."""
    if interval is None:
        return NOTHING
    return Cell(rate(interval.value), interval.value, note=_bounds(interval, rate))


def of_ratio(interval: Interval | None) -> Cell:
    """Return a ratio, such as `1.23x` and `1.19 to 1.28`."""
    if interval is None:
        return NOTHING
    return Cell(f"{interval.value:,.2f}x", interval.value, note=_bounds(interval, lambda each: f"{each:,.2f}"))


def of_change(interval: Interval | None) -> Cell:
    """Return a relative difference, such as `-0.3 %` and `-1.1 to +0.5`."""
    if interval is None:
        return NOTHING
    return Cell(
        f"{100 * interval.value:+.2f} %", interval.value, note=_bounds(interval, lambda each: f"{100 * each:+.2f}")
    )


def of_share(interval: Interval | None) -> Cell:
    """Return a share, such as `93.1 %` and `92.0 to 94.2`."""
    if interval is None:
        return NOTHING
    return Cell(share(interval.value), interval.value, note=_bounds(interval, lambda each: f"{100 * each:.1f}"))


def of_accuracy(interval: Interval | None) -> Cell:
    """Return an accuracy, such as `93.12 %` and `92.95 to 93.29`."""
    if interval is None:
        return NOTHING
    return Cell(accuracy(interval.value), interval.value, note=_bounds(interval, lambda each: f"{100 * each:.2f}"))


def of_points(interval: Interval | None) -> Cell:
    """Return a difference of accuracies, such as `-0.31 points` and `-1.12 to +0.50`."""
    if interval is None:
        return NOTHING
    return Cell(
        f"{100 * interval.value:+.2f} points", interval.value, note=_bounds(interval, lambda each: f"{100 * each:+.2f}")
    )


def of_seconds(interval: Interval | None) -> Cell:
    """Return a duration, such as `12.3 s` and `11.9 s to 12.7 s`."""
    if interval is None:
        return NOTHING
    return Cell(seconds(interval.value), interval.value, note=_bounds(interval, seconds))


def of_number(interval: Interval | None) -> Cell:
    """Return any other number, such as `12.3` and `11.9 to 12.7`."""
    if interval is None:
        return NOTHING
    return Cell(number(interval.value), interval.value, note=_bounds(interval, number))


def rate(images_per_s: float) -> str:
    """Return images/s as text with three digits; decimals of a rate above 1000 are noise."""
    return f"{images_per_s:,.0f}" if images_per_s >= 1000 else number(images_per_s)


def between(low: str, high: str) -> str:
    """Return ` (low to high)` to append to a number in a sentence."""
    return f" ({low} to {high})"


def words(patch: Sequence[str], nothing: str = "") -> Cell:
    """Return overrides as code to paste; `nothing` as text if there are none."""
    text = shlex.join(patch)
    return Cell(clean(text, _LONGEST), is_code=True) if text else Cell(nothing)


def sentence(text: str) -> Cell:
    """Return untrusted text, which may be long, on one line."""
    return Cell(clean(text, _LONGEST))


def maybe_seconds(value_s: float | None) -> Cell:
    """Return a duration; empty for None."""
    return NOTHING if value_s is None else Cell(seconds(value_s), value_s)


def maybe_share(value: float | None) -> Cell:
    """Return a share; empty for None."""
    return NOTHING if value is None else Cell(share(value), value)


def _bounds(interval: Interval, format_bound: Callable[[float], str]) -> str:
    if interval.low is None or interval.high is None:
        return ""
    return f"{format_bound(interval.low)} to {format_bound(interval.high)}"
