"""Where the ticks of an axis stand, and how they are written."""

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Axis:
    """From `low` to `high`, which are ticks, with the value and the text of each tick."""

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]

    def place(self, value: float) -> float:
        """Return where `value` stands, from 0 at `low` to 1 at `high`."""
        return (value - self.low) / (self.high - self.low)


def axis(low: float, high: float, num_ticks: int = 5, *, is_tight: bool = False) -> Axis:
    """Return an axis over `low` to `high` with about `num_ticks` ticks at 1, 2 or 5 times a power of ten.

    A tight one ends with the values and not with ticks.
    """
    if not high - low > 1e-300:  # below which a tenth of it has no logarithm
        around = abs(low) if abs(low) > 1e-300 else 1.0
        low, high = (low, low + around) if low >= 0 else (low - around, low)
    step = _step((high - low) / num_ticks)
    first = math.ceil(low / step - 1e-9) if is_tight else math.floor(low / step + 1e-9)
    last = math.floor(high / step + 1e-9) if is_tight else math.ceil(high / step - 1e-9)
    ticks = [index * step for index in range(first, last + 1)]
    text = _writer(step, max(abs(low), abs(high)))
    ends = (low, high) if is_tight else (ticks[0], ticks[-1])
    return Axis(*ends, tuple((tick, text(tick)) for tick in ticks))


def _step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next(nice * power for nice in (1.0, 2.0, 5.0, 10.0) if nice * power >= rough * (1 - 1e-9))


def _writer(step: float, largest: float) -> Callable[[float], str]:
    """Return how ticks are written: with as many decimals as tell them apart, and a power of ten where that is long."""
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    if decimals > 4 or largest >= 1e7:
        return lambda value: f"{value:.3g}".replace("e-0", "e-").replace("e+0", "e") if value else "0"
    return lambda value: f"{value + 0.0:,.{decimals}f}"
