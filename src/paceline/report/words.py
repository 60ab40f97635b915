"""Format and sanitize values for a reader; `core.units` formats amounts."""

import math
from datetime import UTC, datetime
from typing import Any, Final

from paceline.core.units import number

# No real measurement is larger; sums and squares of smaller values stay finite.
LARGEST: Final = 1e100
_LONGEST: Final = 160


def moment(unix_s: float) -> str:
    """Return a Unix time as `2026-11-21 15:31 UTC`, or as a plain number if it is out of range."""
    try:
        return f"{datetime.fromtimestamp(unix_s, UTC):%Y-%m-%d %H:%M} UTC"
    except (OverflowError, ValueError, OSError):
        return number(unix_s)


def clean(text: object, longest: int = _LONGEST) -> str:
    """Return `text` on one line, cut to `longest` characters, with non-printable characters escaped."""
    line = str(text)
    if len(line) > longest:
        line = line[: longest - 1] + "…"
    return line if line.isprintable() else "".join(c if c.isprintable() else _escape(c) for c in line)


def clean_lines(text: str) -> str:
    """Return `text` with its line breaks, and other non-printable characters escaped."""
    return "\n".join(clean(line, len(line) + 1) for line in text.expandtabs(4).splitlines())


def finite(value: object) -> float | None:
    """Return `value` as a float, or None if it is not a number, not finite or implausibly large."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < LARGEST:
        return None
    return float(value)


def jsonable(value: Any) -> Any:
    """Return plain values with NaN and infinity as strings, since JSON has no such numbers."""
    match value:
        case dict():
            return {str(key): jsonable(each) for key, each in value.items()}
        case list() | tuple():
            return [jsonable(each) for each in value]
        case float() if not math.isfinite(value):
            return str(value)
        case _:
            return value


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
