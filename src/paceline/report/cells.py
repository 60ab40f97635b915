"""Format measured values, intervals and bottlenecks for display, with the labels and colors of stages."""

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from paceline.core.stages import PAUSES, WATCHED, display_name
from paceline.core.statistics import Interval
from paceline.core.units import accuracy, milliseconds, number, per_second, seconds, share, size
from paceline.report.document import BarSegment, BottleneckSummary, Paragraph, StackedBar, TableCell, TableColumn
from paceline.report.text import clean_text, finite_or_none, format_time

EMPTY_CELL: Final = TableCell("")
NOT_MEASURED: Final = TableCell("–")  # noqa: RUF001  the note explains why
Quantity = Interval | float | None
_MAX_SENTENCE_CHARS: Final = 400
# Parts of a process and of all processes of a run, and time that no stage covers.
_PROCESS_PARTS: Final = {
    "useful": "useful",
    "start_up": display_name("start_up"),
    "compile": "compiling",
    "warmup": "measurement warm-up",
    "stages": "steps",
    "rework": "repeated steps",
    "down": "down",
    "finish": "finish",
    "closing": "closing",
    "residual": display_name("residual"),
}


def text_cell(value: object, longest: int = 160) -> TableCell:
    """Return untrusted text on one line."""
    return TableCell(clean_text(value, longest))


def sentence_cell(text: str | None) -> TableCell:
    """Return untrusted text of a sentence or two."""
    return TableCell(clean_text(text or "", _MAX_SENTENCE_CHARS))


def patch_cell(patch: Sequence[str], nothing: str = "") -> TableCell:
    """Return overrides as code to paste, or `nothing`."""
    text = shlex.join(patch)
    return TableCell(clean_text(text, _MAX_SENTENCE_CHARS), is_code=True) if text else TableCell(nothing)


def as_is(cell: TableCell | None) -> TableCell:
    """Return a cell that its row has made."""
    return cell or EMPTY_CELL


# A quantity is a number, an interval, whose bounds are the note of its cell, or None, whose cell is empty.


def count_cell(value: Quantity) -> TableCell:
    """Return a count in full."""
    return _quantity_cell(value, "{:,.0f}".format)


def number_cell(value: Quantity) -> TableCell:
    """Return a number with at least three significant digits."""
    return _quantity_cell(value, number)


def rate_cell(value: Quantity) -> TableCell:
    """Return images/s: `1,234`, `1,200 to 1,260`."""
    return _quantity_cell(value, per_second)


def ratio_cell(value: Quantity) -> TableCell:
    """Return a ratio: `1.23x`, `1.19 to 1.28`."""
    return _quantity_cell(value, "{:,.2f}x".format, "{:,.2f}".format)


def change_cell(value: Quantity) -> TableCell:
    """Return a relative difference: `-0.31 %`, `-1.12 to +0.50`."""
    return _quantity_cell(value, lambda each: f"{100 * each:+.2f} %", _format_change)


def points_cell(value: Quantity) -> TableCell:
    """Return a difference of accuracies: `-0.31 points`, `-1.12 to +0.50`."""
    return _quantity_cell(value, lambda each: f"{100 * each:+.2f} points", _format_change)


def loss_cell(value: Quantity) -> TableCell:
    """Return a loss with four decimals."""
    return _quantity_cell(value, "{:,.4f}".format)


def seconds_cell(value_s: Quantity) -> TableCell:
    """Return a duration in the unit that fits."""
    return _quantity_cell(value_s, seconds)


def milliseconds_cell(value_s: Quantity) -> TableCell:
    """Return a duration in milliseconds."""
    return _quantity_cell(value_s, milliseconds)


def share_cell(value: Quantity, *, bar: bool = False) -> TableCell:
    """Return a share (0 to 1) as a percentage: `93.1 %`, `92.0 to 94.2`."""
    return _quantity_cell(value, share, lambda each: f"{100 * each:.1f}", bar=bar)


def accuracy_cell(value: Quantity, *, bar: bool = False) -> TableCell:
    """Return an accuracy (0 to 1) as a percentage: `93.12 %`, `92.95 to 93.29`."""
    return _quantity_cell(value, accuracy, lambda each: f"{100 * each:.2f}", bar=bar)


def bytes_cell(value: Quantity) -> TableCell:
    """Return a size in the unit that fits."""
    return _quantity_cell(value, size)


def time_cell(unix_s: Quantity) -> TableCell:
    """Return a Unix time as date and time of day."""
    return _quantity_cell(unix_s, format_time)


def _quantity_cell(
    quantity: Quantity,
    format_value: Callable[[float], str],
    format_bound: Callable[[float], str] | None = None,
    *,
    bar: bool = False,
) -> TableCell:
    if quantity is None:
        return EMPTY_CELL
    interval = quantity if isinstance(quantity, Interval) else Interval.model_construct(value=quantity)
    value, length = interval.value, min(1.0, max(0.0, interval.value)) if bar else None
    return TableCell(format_value(value), value, bar=length, note=format_bounds(interval, format_bound or format_value))


def format_bounds(interval: Interval, format_bound: Callable[[float], str]) -> str:
    """Return `1,200 to 1,260`, or "" for an interval without bounds."""
    if interval.low is None or interval.high is None:
        return ""
    return f"{format_bound(interval.low)} to {format_bound(interval.high)}"


def _format_change(change: float) -> str:
    return f"{100 * change:+.2f}"


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
    if isinstance(value, dict) and not any(isinstance(each, dict | list) for each in value.values()):
        return text_cell(", ".join(f"{name} {each}" for name, each in value.items()), 300)
    if isinstance(value, dict | list):
        return text_cell(json.dumps(value), 300)
    return text_cell("unknown" if value == "" else value, 300)


def summarize_verdict(recorded: Mapping[str, str], whose: str = "") -> BottleneckSummary | None:
    """Return the bottleneck that a result has recorded, after the words `whose` if any; None if unknown."""
    if not recorded.get("bottleneck"):
        return None
    texts = {key: clean_text(value, 600) for key, value in recorded.items()}
    return BottleneckSummary(
        f"{whose}: {texts['bottleneck']}" if whose else texts["bottleneck"],
        texts.get("evidence", ""),
        f"Ceiling: {texts['ceiling'].rstrip('.')}." if texts.get("ceiling") else "",
        command="",
        advice=texts.get("try", ""),
    )


@dataclass(frozen=True)
class TimeUnit:
    """A unit of time of `seconds` seconds."""

    unit: str
    seconds: float

    def convert(self, value_s: float) -> float:
        """Return `value_s` in this unit."""
        return value_s / self.seconds


def choose_time_unit(longest_s: float) -> TimeUnit:
    """Return seconds up to 3 minutes, minutes up to 3 hours, hours up to 3 days, and days above."""
    units = (("s", 1.0, 180.0), ("min", 60.0, 10_800.0), ("h", 3600.0, 259_200.0))
    return next((TimeUnit(unit, each) for unit, each, limit in units if longest_s <= limit), TimeUnit("days", 86_400.0))


def stage_label(key: str) -> str:
    """Return the label of a stage, a pause or another part of a run."""
    return _PROCESS_PARTS.get(key) or display_name(key)


def stage_colour(key: str) -> str:
    """Return the CSS class of a part."""
    return f"c-{key.replace('_', '-')}" if key in (*_PROCESS_PARTS, *WATCHED, *PAUSES) else "c-unknown"


def time_bar(
    title: str, parts: Mapping[str, float], whole_s: float, *, note: str = "", has_legend: bool = True
) -> StackedBar:
    """Return a stacked bar of the seconds of stages, pauses or other parts of a run."""
    scale = ["0 s", seconds(whole_s / 2), seconds(whole_s)]
    return StackedBar(title, time_segments(parts, whole_s), scale, note, has_legend)


def time_segments(parts: Mapping[str, float], whole_s: float) -> list[BarSegment]:
    """Return the segments of a bar of `whole_s` seconds."""
    return [
        BarSegment(stage_label(key), each_s / whole_s, seconds(each_s), stage_colour(key))
        for key, each_s in parts.items()
        if each_s > 0 and whole_s > 0
    ]


def table_columns(texts: Sequence[str], numbers: Sequence[str] = ()) -> list[TableColumn]:
    """Return columns of text, then columns of numbers."""
    return [*(TableColumn(title, is_number=False) for title in texts), *map(TableColumn, numbers)]
