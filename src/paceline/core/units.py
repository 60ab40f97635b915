"""Parse durations (`5ep`, `500st`, `50000img`, `10%`, `30min`), and format numbers for the terminal and reports."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal, Self, get_args

Unit = Literal["ep", "st", "img", "%", "s", "min", "h"]
SECONDS: dict[str, float] = {"s": 1.0, "min": 60.0, "h": 3600.0}
TRAINING_UNITS: tuple[Unit, ...] = ("ep", "st", "img", "%")
TIME_UNITS: tuple[Unit, ...] = ("s", "min", "h")
_EXAMPLES: dict[Unit, str] = {
    "ep": "5ep", "st": "500st", "img": "50000img", "%": "10%", "s": "90s", "min": "30min", "h": "2h"
}  # fmt: skip
_PATTERN = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z%]+)")


@dataclass(frozen=True)
class Duration:
    """A length of training or of time: `value` in `unit`.

    Units: `ep` epochs, `st` optimizer steps, `img` images, `%` of the run, and `s`, `min`, `h` of wall clock.
    """

    value: float
    unit: Unit

    @classmethod
    def parse(cls, text: object, units: Sequence[Unit] = TRAINING_UNITS + TIME_UNITS) -> Self:
        """Parse `text`, such as `"5ep"`. Raise `ValueError` unless it is a number and a known unit.

        `units` are only listed in the error; callers check the unit.
        """
        match = _PATTERN.fullmatch(text.strip()) if isinstance(text, str) else None
        if match is None or match[2] not in get_args(Unit) or math.isinf(float(match[1])):
            *most, last = (_EXAMPLES[unit] for unit in units)
            raise ValueError(f"{text!r} is not a duration (write {', '.join(most)} or {last})")
        return cls(float(match[1]), match[2])  # type: ignore[arg-type]

    def __str__(self) -> str:
        # Decimal keeps every digit without an exponent, so `parse` reads back an equal value.
        return f"{Decimal(str(self.value)):f}".removesuffix(".0") + self.unit

    @property
    def is_time(self) -> bool:
        """Whether this is wall-clock time, not an amount of training."""
        return self.unit in SECONDS

    @property
    def seconds(self) -> float:
        """Wall-clock length in seconds. Only for time units."""
        return self.value * SECONDS[self.unit]

    def steps(self, *, steps_per_epoch: int, batch_size: int, total_steps: int) -> int:
        """Return the number of optimizer steps, rounded to the nearest. Not for time units."""
        assert not self.is_time, f"{self} has no number of steps"
        per_unit = {
            "ep": steps_per_epoch,
            "st": 1,
            "img": 1 / batch_size,
            "%": total_steps / 100,
        }[self.unit]
        return round(self.value * per_unit)


def duration(value_s: float) -> str:
    """Return `7 s`, `12 min 30 s` or `3 h 05 min`: whole seconds, and whole minutes from an hour."""
    minutes, second = divmod(round(value_s), 60)
    if not minutes:
        return f"{second} s"
    return f"{minutes} min {second:02} s" if minutes < 60 else _hours(value_s)


def _hours(value_s: float) -> str:
    hours, minute = divmod(round(value_s / 60), 60)
    return f"{hours:,} h {minute:02} min"


def rough_duration(value_s: float) -> str:
    """Return a duration with the digits of an estimate: `40 s`, `12 min`, `7.9 h`, `40 days`."""
    if value_s < 1:
        return f"{value_s:.2f} s"
    for limit, unit_s, unit in ((100, 1, "s"), (100 * 60, 60, "min"), (72 * 3600, 3600, "h")):
        if value_s < limit:
            value = value_s / unit_s
            return f"{value:.0f} {unit}" if value >= 10 else f"{value:.2g} {unit}"
    return f"{value_s / 86400:,.0f} days"


def number(value: float, digits: int = 3) -> str:
    """Return `1,234`, `12.3` or `0.0123`: at least `digits` significant digits, integers in full."""
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    if decimals > 6:
        return f"{value:.{digits - 1}e}"
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.{decimals}f}"


def per_second(per_s: float) -> str:
    """Return a rate, such as images/s, as `1,593` or `33.7`: three digits, and none after the point from 1000."""
    return f"{per_s:,.0f}" if abs(per_s) >= 1000 else number(per_s)


def seconds(value_s: float) -> str:
    """Return `1.70 µs`, `12.3 ms`, `4.70 s`, `39.9 s`, `7 min 21 s` or `1 h 03 min`."""
    if not math.isfinite(value_s) or value_s == 0:
        return f"{number(value_s)} s"
    if abs(value_s) < 1e-3:
        return f"{number(1e6 * value_s)} µs"
    if abs(value_s) < 1:
        return milliseconds(value_s)
    if abs(value_s) < 59.95:  # at which one decimal would round to 60.0
        return f"{value_s:.1f} s" if abs(value_s) >= 9.995 else f"{value_s:.2f} s"
    sign = "-" if value_s < 0 else ""
    return f"{sign}{duration(abs(value_s))}"


def milliseconds(value_s: float) -> str:
    """Return seconds as `12.3 ms`."""
    return f"{number(1000 * value_s)} ms" if abs(value_s) >= 1e-6 else "0 ms"


def share(value: float) -> str:
    """Return a share as `99.3 %`, and a positive share below 0.05 % as `< 0.1 %`."""
    if 0 < value < 0.0005:
        return "< 0.1 %"
    return f"{100 * value:.1f} %" if math.isfinite(value) else number(value)


def percent(value: float) -> str:
    """Return a share in whole percent, as a rough part of a whole: `33 %`, and below one percent `< 1 %`."""
    return "< 1 %" if 0 < value < 0.005 else f"{100 * value:.0f} %"


def accuracy(value: float) -> str:
    """Return a share as `97.22 %`: one image of 10,000 is visible."""
    return f"{100 * value:.2f} %" if math.isfinite(value) else number(value)


def size(num_bytes: float) -> str:
    """Return `512 bytes`, `93.7 MB` or `1.21 GB`."""
    if num_bytes < 1000:
        return f"{num_bytes:.0f} bytes"
    unit, unit_bytes = byte_unit(num_bytes)
    return f"{number(num_bytes / unit_bytes)} {unit}"


def energy(kwh: float) -> str:
    """Return `1.21 kWh`, or below 1 kWh `93.7 Wh`."""
    return f"{number(kwh)} kWh" if kwh >= 1 else f"{number(1000 * kwh)} Wh"


def byte_unit(num_bytes: float) -> tuple[str, float]:
    """Return the decimal unit for an amount of bytes, and its size in bytes; at least kB."""
    scales = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6))
    return next(((unit, scale) for unit, scale in scales if num_bytes >= scale), ("kB", 1e3))


def flops(value: float) -> str:
    """Return `3.34 GFLOP`: floating-point operations, counting a multiply-add as two."""
    scales = (("P", 1e15), ("T", 1e12), ("G", 1e9))
    prefix, scale = next(((prefix, scale) for prefix, scale in scales if value >= scale), ("M", 1e6))
    return f"{number(value / scale)} {prefix}FLOP"


def parameters(value: int) -> str:
    """Return a parameter count as `11.2 M`, in full below a million."""
    return f"{number(value / 1e6)} M" if value >= 1e6 else f"{value:,}"


def mib(num_bytes: int) -> str:
    """Return `89.4 MiB`."""
    return f"{num_bytes / 2**20:,.1f} MiB"


def count(value: float, noun: str, plural: str = "") -> str:
    """Return `1 epoch`, `16 epochs`, `1,234 steps`; pass `plural` unless it is `noun` with an s."""
    text = f"{value:,.0f}" if float(value).is_integer() else f"{value:g}"
    return f"{text} {noun}" if value == 1 else f"{text} {plural or f'{noun}s'}"


def join_few(items: Sequence[str], between: str = ", ") -> str:
    """Join up to five of `items`, and say how many more there are."""
    return between.join(items[:5]) + (f" and {len(items) - 5:,} more" if len(items) > 5 else "")
