"""Format measured values as table cells: text for the reader, and the value as measured."""

import json
from typing import Any

from paceline.core.units import accuracy, milliseconds, number, seconds, share, size
from paceline.report.blocks import Cell, Paragraph
from paceline.report.words import clean, finite, moment


def text(value: object, longest: int = 160) -> Cell:
    """Return untrusted text on one line."""
    return Cell(clean(value, longest))


def count(value: float) -> Cell:
    """Return a count in full."""
    return Cell(f"{value:,.0f}", value)


def plain(value: float | None) -> Cell:
    """Return a number with at least three significant digits; empty for None."""
    return Cell("") if value is None else Cell(number(value), value)


def loss(value: float | None) -> Cell:
    """Return a loss or an error with four decimals; empty for None."""
    return Cell("") if value is None else Cell(f"{value:,.4f}", value)


def of_seconds(value: float) -> Cell:
    """Return a duration in the unit that fits."""
    return Cell(seconds(value), value)


def of_milliseconds(value_s: float) -> Cell:
    """Return a duration in milliseconds."""
    return Cell(milliseconds(value_s), value_s)


def of_share(value: float, *, bar: bool = False) -> Cell:
    """Return a share (0 to 1) as a percentage, optionally with a bar."""
    return Cell(share(value), value, bar=min(1.0, max(0.0, value)) if bar else None)


def of_accuracy(value: float | None, *, bar: bool = False) -> Cell:
    """Return an accuracy (0 to 1) as a percentage, optionally with a bar; empty for None."""
    return Cell("") if value is None else Cell(accuracy(value), value, bar=value if bar else None)


def of_bytes(value: float) -> Cell:
    """Return a size in the unit that fits."""
    return Cell(size(value), value)


def of_moment(unix_s: float | None) -> Cell:
    """Return a Unix time as date and time of day; empty for None."""
    return Cell("") if unix_s is None else Cell(moment(unix_s), unix_s)


def missing(sentence: str) -> Paragraph:
    """Return a note on why something is absent."""
    return Paragraph(sentence, is_missing=True)


def facts_of(recorded: dict[str, Any]) -> list[tuple[str, Cell]]:
    """Return recorded facts as names and values, at most 60."""
    return [(clean(key).replace("_", " "), of_value(key, value)) for key, value in list(recorded.items())[:60]]


def of_value(key: str, value: Any) -> Cell:
    """Return a JSON value, formatted by its key and type."""
    amount = finite(value)
    if amount is not None and key.endswith("_bytes"):
        return Cell(size(amount), amount)
    if amount is not None and isinstance(value, int):
        return count(amount)
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return text(", ".join(value), 300)
    if isinstance(value, dict | list):
        return text(json.dumps(value), 300)
    return text("unknown" if value == "" else value, 300)
