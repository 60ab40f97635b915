"""Numbers and names as a reader sees them. Values go in, text comes out; nothing is rounded before it gets here."""

import math
from datetime import UTC, datetime
from typing import Any, Final

from paceline.core.units import duration

LARGEST: Final = 1e100
"""No measurement is so large; sums and squares of what is smaller stay finite."""
_LONGEST: Final = 160


def number(value: float, digits: int = 3) -> str:
    """Return `1,234`, `12.3` or `0.0123`: at least `digits` significant digits, whole ones in full."""
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    if decimals > 6:
        return f"{value:.{digits - 1}e}"
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.{decimals}f}"


def seconds(value: float) -> str:
    """Return `1.70 µs`, `12.3 ms`, `4.70 s`, `1:18 min` or `3:05:00 h`."""
    if not math.isfinite(value) or value == 0:
        return f"{number(value)} s"
    if abs(value) < 1e-3:
        return f"{number(1e6 * value)} µs"
    if abs(value) < 1:
        return milliseconds(value)
    if abs(value) < 60:
        return f"{value:.1f} s" if abs(value) >= 10 else f"{value:.2f} s"
    return f"{duration(value)} {'min' if abs(value) < 3600 else 'h'}"


def milliseconds(value_s: float) -> str:
    """Return seconds as `12.3 ms`."""
    return f"{number(1000 * value_s)} ms" if abs(value_s) >= 1e-6 else "0 ms"


def share(value: float) -> str:
    """Return a share as `99.3 %`; what is there but would round to nothing as `< 0.1 %`."""
    if 0 < value < 0.0005:
        return "< 0.1 %"
    return f"{100 * value:.1f} %" if math.isfinite(value) else number(value)


def accuracy(value: float) -> str:
    """Return a share as `97.22 %`: two digits, as one image of 10,000 is to be seen."""
    return f"{100 * value:.2f} %" if math.isfinite(value) else number(value)


def size(num_bytes: float) -> str:
    """Return `512 bytes`, `89.4 MiB` or `1.21 GiB`."""
    if num_bytes < 1024:
        return f"{num_bytes:.0f} bytes"
    unit, unit_bytes = byte_unit(num_bytes)
    return f"{number(num_bytes / unit_bytes)} {unit}"


def byte_unit(num_bytes: float) -> tuple[str, float]:
    """Return the binary unit that an amount is told in, and how many bytes that has; the smallest is KiB."""
    power = max(1, min(4, math.floor(math.log2(num_bytes) / 10))) if num_bytes > 0 else 1
    return ("KiB", "MiB", "GiB", "TiB")[power - 1], 1024.0**power


def large(value: float) -> str:
    """Return `11.2 million` or `3.86 trillion`, what is smaller in full."""
    for power, name in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if abs(value) >= power:
            return f"{number(value / power)} {name}"
    return number(value)


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
