"""Choose the unit of a time axis."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TimeUnit:
    """A unit of time, and its length in seconds."""

    unit: str
    seconds: float

    def convert(self, value_s: float) -> float:
        """Return `value_s` in this unit."""
        return value_s / self.seconds


def choose_time_unit(longest_s: float) -> TimeUnit:
    """Return seconds up to 3 minutes, minutes up to 3 hours, hours up to 3 days, and days above."""
    units = (("s", 1.0, 180.0), ("min", 60.0, 10_800.0), ("h", 3600.0, 259_200.0))
    return next((TimeUnit(unit, each) for unit, each, limit in units if longest_s <= limit), TimeUnit("days", 86_400.0))
