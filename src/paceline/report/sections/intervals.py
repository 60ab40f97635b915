"""Format intervals as table cells (empty for None), the bounds below the value."""

import shlex
from collections.abc import Callable, Sequence
from typing import Final

from paceline.core.interval import Interval
from paceline.core.units import accuracy, number, seconds, share
from paceline.report.blocks import TableCell
from paceline.report.words import clean_text

EMPTY_CELL: Final = TableCell("")
_MAX_SENTENCE_CHARS: Final = 400


def rate_interval_cell(interval: Interval | None) -> TableCell:
    """Return a rate in images/s, such as `1,234` and `1,200 to 1,260`."""
    if interval is None:
        return EMPTY_CELL
    return TableCell(format_rate(interval.value), interval.value, note=_interval_note(interval, format_rate))


def ratio_interval_cell(interval: Interval | None) -> TableCell:
    """Return a ratio, such as `1.23x` and `1.19 to 1.28`."""
    if interval is None:
        return EMPTY_CELL
    return TableCell(
        f"{interval.value:,.2f}x", interval.value, note=_interval_note(interval, lambda each: f"{each:,.2f}")
    )


def change_interval_cell(interval: Interval | None) -> TableCell:
    """Return a relative difference, such as `-0.3 %` and `-1.1 to +0.5`."""
    if interval is None:
        return EMPTY_CELL
    return TableCell(
        f"{100 * interval.value:+.2f} %",
        interval.value,
        note=_interval_note(interval, lambda each: f"{100 * each:+.2f}"),
    )


def share_interval_cell(interval: Interval | None) -> TableCell:
    """Return a share, such as `93.1 %` and `92.0 to 94.2`."""
    if interval is None:
        return EMPTY_CELL
    return TableCell(
        share(interval.value), interval.value, note=_interval_note(interval, lambda each: f"{100 * each:.1f}")
    )


def accuracy_interval_cell(interval: Interval | None) -> TableCell:
    """Return an accuracy, such as `93.12 %` and `92.95 to 93.29`."""
    if interval is None:
        return EMPTY_CELL
    return TableCell(
        accuracy(interval.value), interval.value, note=_interval_note(interval, lambda each: f"{100 * each:.2f}")
    )


def points_interval_cell(interval: Interval | None) -> TableCell:
    """Return a difference of accuracies, such as `-0.31 points` and `-1.12 to +0.50`."""
    if interval is None:
        return EMPTY_CELL
    return TableCell(
        f"{100 * interval.value:+.2f} points",
        interval.value,
        note=_interval_note(interval, lambda each: f"{100 * each:+.2f}"),
    )


def seconds_interval_cell(interval: Interval | None) -> TableCell:
    """Return a duration, such as `12.3 s` and `11.9 s to 12.7 s`."""
    if interval is None:
        return EMPTY_CELL
    return TableCell(seconds(interval.value), interval.value, note=_interval_note(interval, seconds))


def number_interval_cell(interval: Interval | None) -> TableCell:
    """Return any other number, such as `12.3` and `11.9 to 12.7`."""
    if interval is None:
        return EMPTY_CELL
    return TableCell(number(interval.value), interval.value, note=_interval_note(interval, number))


def format_rate(images_per_s: float) -> str:
    """Return images/s as text with three digits; decimals of a rate above 1000 are noise."""
    return f"{images_per_s:,.0f}" if images_per_s >= 1000 else number(images_per_s)


def format_range(low: str, high: str) -> str:
    """Return ` (low to high)` to append to a number in a sentence."""
    return f" ({low} to {high})"


def patch_cell(patch: Sequence[str], nothing: str = "") -> TableCell:
    """Return overrides as code to paste; `nothing` as text if there are none."""
    text = shlex.join(patch)
    return TableCell(clean_text(text, _MAX_SENTENCE_CHARS), is_code=True) if text else TableCell(nothing)


def sentence_cell(text: str) -> TableCell:
    """Return untrusted text, which may be long, on one line."""
    return TableCell(clean_text(text, _MAX_SENTENCE_CHARS))


def optional_seconds_cell(value_s: float | None) -> TableCell:
    """Return a duration; empty for None."""
    return EMPTY_CELL if value_s is None else TableCell(seconds(value_s), value_s)


def optional_share_cell(value: float | None) -> TableCell:
    """Return a share; empty for None."""
    return EMPTY_CELL if value is None else TableCell(share(value), value)


def _interval_note(interval: Interval, format_bound: Callable[[float], str]) -> str:
    if interval.low is None or interval.high is None:
        return ""
    return f"{format_bound(interval.low)} to {format_bound(interval.high)}"
