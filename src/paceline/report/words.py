"""Names, moments and values from outside as a reader sees them; how amounts are written is in `core.units`."""

import math
from datetime import UTC, datetime
from typing import Any, Final

from paceline.core.units import number

LARGEST: Final = 1e100
"""No measurement is so large; sums and squares of what is smaller stay finite."""
_LONGEST: Final = 160


def moment(unix_s: float) -> str:
    """Return seconds since 1970 as `2026-11-21 15:31 UTC`; an impossible time as the number."""
    try:
        return f"{datetime.fromtimestamp(unix_s, UTC):%Y-%m-%d %H:%M} UTC"
    except (OverflowError, ValueError, OSError):
        return number(unix_s)


def clean(text: object, longest: int = _LONGEST) -> str:
    """Return `text` on one line, cut to `longest` characters, with what cannot be printed as an escape."""
    line = str(text)
    if len(line) > longest:
        line = line[: longest - 1] + "…"
    return line if line.isprintable() else "".join(c if c.isprintable() else _escape(c) for c in line)


def clean_lines(text: str) -> str:
    """Return `text` with its lines as they are, and what cannot be printed as an escape."""
    return "\n".join(clean(line, len(line) + 1) for line in text.expandtabs(4).splitlines())


def finite(value: object) -> float | None:
    """Return `value` as a float; None for what is no number, not finite, or too large to be a measurement."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < LARGEST:
        return None
    return float(value)


def jsonable(value: Any) -> Any:
    """Return plain values with infinity and NaN as text, which JSON does not have as numbers."""
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
