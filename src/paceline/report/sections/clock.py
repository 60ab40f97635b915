"""Choose the unit of a time axis."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Clock:
    """A unit of time, and its length in seconds."""

    unit: str
    seconds: float

    def of(self, value_s: float) -> float:
        """Return `value_s` in this unit."""
        return value_s / self.seconds


def clock_for(longest_s: float) -> Clock:
    """Return seconds up to 3 minutes, minutes up to 3 hours, hours up to 3 days, and days above."""
    units = (("s", 1.0, 180.0), ("min", 60.0, 10_800.0), ("h", 3600.0, 259_200.0))
    return next((Clock(unit, each) for unit, each, limit in units if longest_s <= limit), Clock("days", 86_400.0))
