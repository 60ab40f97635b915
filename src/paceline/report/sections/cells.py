"""Format measured values as table cells: text for the reader, and the value as measured."""

import json
from typing import Any

from paceline.core.units import accuracy, milliseconds, number, seconds, share, size
from paceline.report.blocks import Paragraph, TableCell
from paceline.report.words import clean_text, finite_or_none, format_time


def text_cell(value: object, longest: int = 160) -> TableCell:
    """Return untrusted text on one line."""
    return TableCell(clean_text(value, longest))


def count_cell(value: float) -> TableCell:
    """Return a count in full."""
    return TableCell(f"{value:,.0f}", value)


def number_cell(value: float | None) -> TableCell:
    """Return a number with at least three significant digits; empty for None."""
    return TableCell("") if value is None else TableCell(number(value), value)


def loss_cell(value: float | None) -> TableCell:
    """Return a loss or an error with four decimals; empty for None."""
    return TableCell("") if value is None else TableCell(f"{value:,.4f}", value)


def seconds_cell(value: float) -> TableCell:
    """Return a duration in the unit that fits."""
    return TableCell(seconds(value), value)


def milliseconds_cell(value_s: float) -> TableCell:
    """Return a duration in milliseconds."""
    return TableCell(milliseconds(value_s), value_s)


def share_cell(value: float, *, bar: bool = False) -> TableCell:
    """Return a share (0 to 1) as a percentage, optionally with a bar."""
    return TableCell(share(value), value, bar=min(1.0, max(0.0, value)) if bar else None)


def accuracy_cell(value: float | None, *, bar: bool = False) -> TableCell:
    """Return an accuracy (0 to 1) as a percentage, optionally with a bar; empty for None."""
    return TableCell("") if value is None else TableCell(accuracy(value), value, bar=value if bar else None)


def bytes_cell(value: float) -> TableCell:
    """Return a size in the unit that fits."""
    return TableCell(size(value), value)


def time_cell(unix_s: float | None) -> TableCell:
    """Return a Unix time as date and time of day; empty for None."""
    return TableCell("") if unix_s is None else TableCell(format_time(unix_s), unix_s)


def missing_paragraph(sentence: str) -> Paragraph:
    """Return a note on why something is absent."""
    return Paragraph(sentence, is_missing=True)


def key_values(recorded: dict[str, Any]) -> list[tuple[str, TableCell]]:
    """Return recorded facts as names and values, at most 60."""
    return [(clean_text(key).replace("_", " "), value_cell(key, value)) for key, value in list(recorded.items())[:60]]


def value_cell(key: str, value: Any) -> TableCell:
    """Return a JSON value, formatted by its key and type."""
    amount = finite_or_none(value)
    if amount is not None and key.endswith("_bytes"):
        return TableCell(size(amount), amount)
    if amount is not None and isinstance(value, int):
        return count_cell(amount)
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return text_cell(", ".join(value), 300)
    if isinstance(value, dict | list):
        return text_cell(json.dumps(value), 300)
    return text_cell("unknown" if value == "" else value, 300)
