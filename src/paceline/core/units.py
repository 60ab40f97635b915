"""Durations as people write them (`5ep`, `500st`, `50000img`, `10%`, `30min`), resolved once to steps or seconds."""

import math
import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal, Self, get_args

Unit = Literal["ep", "st", "img", "%", "s", "min", "h"]
SECONDS: dict[str, float] = {"s": 1.0, "min": 60.0, "h": 3600.0}
_PATTERN = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z%]+)")


@dataclass(frozen=True)
class Duration:
    """A length of training or of time: `value` in `unit`.

    Units: `ep` epochs, `st` optimizer steps, `img` images, `%` of the run, and `s`, `min`, `h` of wall clock.
    """

    value: float
    unit: Unit

    @classmethod
    def parse(cls, text: object) -> Self:
        """Read `text`, such as `"5ep"`. Raise `ValueError` when it is not a number and a known unit."""
        match = _PATTERN.fullmatch(text.strip()) if isinstance(text, str) else None
        if match is None or match[2] not in get_args(Unit) or math.isinf(float(match[1])):
            raise ValueError(f"{text!r} is not a duration (write 5ep, 500st, 50000img, 10%, 90s, 30min or 2h)")
        return cls(float(match[1]), match[2])  # type: ignore[arg-type]

    def __str__(self) -> str:
        return f"{Decimal(str(self.value)):f}".removesuffix(".0") + self.unit  # every digit, as `parse` reads it

    @property
    def is_time(self) -> bool:
        """Whether this is wall-clock time rather than an amount of training."""
        return self.unit in SECONDS

    @property
    def seconds(self) -> float:
        """Return the wall-clock length. Only for time units."""
        return self.value * SECONDS[self.unit]

    def steps(self, *, steps_per_epoch: int, batch_size: int, total_steps: int) -> int:
        """Return the number of optimizer steps, rounded to the nearest. Only for units that are not time."""
        assert not self.is_time, f"{self} has no number of steps"
        per_unit = {
            "ep": steps_per_epoch,
            "st": 1,
            "img": 1 / batch_size,
            "%": total_steps / 100,
        }[self.unit]
        return round(self.value * per_unit)


def duration(seconds: float) -> str:
    """Return `0:07`, `12:30` or `3:05:00`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def mib(num_bytes: int) -> str:
    """Return `89.4 MiB`."""
    return f"{num_bytes / 2**20:,.1f} MiB"


def count(number: float, noun: str) -> str:
    """Return `1 epoch`, `16 epochs`, `1,234 steps`."""
    text = f"{number:,.0f}" if float(number).is_integer() else f"{number:g}"
    return f"{text} {noun}" if number == 1 else f"{text} {noun}s"
