"""Measured values as cells of a table: the text a reader sees, and beside it the number as it was measured."""

import json
from typing import Any

from paceline.core.units import accuracy, milliseconds, number, seconds, share, size
from paceline.report.blocks import Cell, Paragraph
from paceline.report.words import clean, finite, moment


def text(value: object, longest: int = 160) -> Cell:
    """Return words from outside, on one line."""
    return Cell(clean(value, longest))


def count(value: float) -> Cell:
    """Return a count, in full."""
    return Cell(f"{value:,.0f}", value)


def plain(value: float | None) -> Cell:
    """Return a number with three significant digits or more; None as nothing measured."""
    return Cell("") if value is None else Cell(number(value), value)


def loss(value: float | None) -> Cell:
    """Return a loss or an error with four decimals."""
    return Cell("") if value is None else Cell(f"{value:,.4f}", value)


def of_seconds(value: float) -> Cell:
    """Return seconds, in the unit that fits."""
    return Cell(seconds(value), value)


def of_milliseconds(value_s: float) -> Cell:
    """Return seconds in milliseconds."""
    return Cell(milliseconds(value_s), value_s)


def of_share(value: float, *, bar: bool = False) -> Cell:
    """Return a share, with a bar of it where asked for."""
    return Cell(share(value), value, bar=min(1.0, max(0.0, value)) if bar else None)


def of_accuracy(value: float | None, *, bar: bool = False) -> Cell:
    """Return an accuracy, 0 to 1, with a bar of it where asked for."""
    return Cell("") if value is None else Cell(accuracy(value), value, bar=value if bar else None)


def of_bytes(value: float) -> Cell:
    """Return an amount of memory or data."""
    return Cell(size(value), value)


def of_moment(unix_s: float | None) -> Cell:
    """Return seconds since 1970 as a date and a time of day."""
    return Cell("") if unix_s is None else Cell(moment(unix_s), unix_s)


def missing(sentence: str) -> Paragraph:
    """Return a sentence that says what is not there, and why."""
    return Paragraph(sentence, is_missing=True)


def facts_of(known: dict[str, Any]) -> list[tuple[str, Cell]]:
    """Return what is known of a machine and its versions as names and values, whatever it is."""
    return [(clean(key).replace("_", " "), of_value(key, value)) for key, value in list(known.items())[:60]]


def of_value(key: str, value: Any) -> Cell:
    """Return a value of a JSON file, as its key and type suggest."""
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
