"""The unit in which a time axis is written."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Clock:
    """A unit of time, and how many seconds it has."""

    unit: str
    seconds: float

    def of(self, value_s: float) -> float:
        """Return seconds in this unit."""
        return value_s / self.seconds


def clock_for(longest_s: float) -> Clock:
    """Return seconds up to three minutes, minutes up to three hours, hours up to three days, then days."""
    units = (("s", 1.0, 180.0), ("min", 60.0, 10_800.0), ("h", 3600.0, 259_200.0))
    return next((Clock(unit, each) for unit, each, limit in units if longest_s <= limit), Clock("days", 86_400.0))
