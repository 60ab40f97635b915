"""Format and sanitize values for a reader; `core.units` formats amounts."""

import math
from datetime import UTC, datetime
from typing import Any, Final

from paceline.core.units import number

# No real measurement is larger; sums and squares of smaller values stay finite.
MAX_MAGNITUDE: Final = 1e100
_MAX_CHARS: Final = 160


def format_time(unix_s: float) -> str:
    """Return a Unix time as `2026-11-21 15:31 UTC`; a number out of range stays one."""
    try:
        return f"{datetime.fromtimestamp(unix_s, UTC):%Y-%m-%d %H:%M} UTC"
    except (OverflowError, ValueError, OSError):
        return number(unix_s)


def clean_text(text: object, longest: int = _MAX_CHARS) -> str:
    """Return `text` on one line, cut to `longest` characters, with non-printable characters escaped."""
    line = str(text)
    if len(line) > longest:
        line = line[: longest - 1] + "…"
    return line if line.isprintable() else "".join(c if c.isprintable() else _escape_character(c) for c in line)


def clean_lines(text: str) -> str:
    """Return `text` with its line breaks, and other non-printable characters escaped."""
    return "\n".join(clean_text(line, len(line) + 1) for line in text.expandtabs(4).splitlines())


def finite_or_none(value: object) -> float | None:
    """Return `value` as a float; None if it is no number, not finite or implausibly large."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < MAX_MAGNITUDE:
        return None
    return float(value)


def to_jsonable(value: Any) -> Any:
    """Return plain values with NaN and infinity as strings, since JSON has no such numbers."""
    match value:
        case dict():
            return {str(key): to_jsonable(each) for key, each in value.items()}
        case list() | tuple():
            return [to_jsonable(each) for each in value]
        case float() if not math.isfinite(value):
            return str(value)
        case _:
            return value


def _escape_character(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
