"""Compute the ticks of chart axes and format them."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Axis:
    """An axis from `low` to `high` with the value and text of each tick; `scale` maps values to a linear scale."""

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    scale: Callable[[float], float] = field(default=float)

    def position(self, value: float) -> float:
        """Return the position of `value`, from 0 at `low` to 1 at `high`."""
        low, high = self.scale(self.low), self.scale(self.high)
        return (self.scale(value) - low) / (high - low)


def linear_axis(low: float, high: float, num_ticks: int = 5, *, is_tight: bool = False) -> Axis:
    """Return a linear axis with about `num_ticks` ticks at 1, 2 or 5 times a power of ten.

    A tight axis ends at the values instead of at ticks.
    """
    if not high - low > 1e-300:  # below this, a tenth of it underflows to 0 and has no logarithm
        around = abs(low) if abs(low) > 1e-300 else 1.0
        low, high = (low, low + around) if low >= 0 else (low - around, low)
    step = _nice_step((high - low) / num_ticks)
    first = math.ceil(low / step - 1e-9) if is_tight else math.floor(low / step + 1e-9)
    last = math.floor(high / step + 1e-9) if is_tight else math.ceil(high / step - 1e-9)
    ticks = [index * step for index in range(first, last + 1)]
    text = _tick_formatter(step, max(abs(low), abs(high)))
    ends = (low, high) if is_tight else (ticks[0], ticks[-1])
    return Axis(*ends, tuple((tick, text(tick)) for tick in ticks))


def log2_axis(low: float, high: float, num_ticks: int = 7) -> Axis:
    """Return a log axis over positive values with at most `num_ticks` ticks at powers of two, such as rank counts.

    With fewer than two powers of two in range, the ticks are at both ends.
    """
    if not high > low:
        # Center a single value with its own tick alone: half a rank is meaningless.
        return Axis(low / 2, low * 2, ((low, _format_power(low)),), math.log)
    first, last = math.ceil(math.log2(low) - 1e-9), math.floor(math.log2(high) + 1e-9)
    every = max(1, -(-(last - first + 1) // num_ticks))
    ticks = [2.0**power for power in range(first, last + 1, every)]
    ticks = ticks if len(ticks) > 1 else [low, high]
    return Axis(low, high, tuple((tick, _format_power(tick)) for tick in ticks), math.log)


def log10_axis(low: float, high: float, num_ticks: int = 5) -> Axis:
    """Return a log axis over positive values that ends at ticks: at 1, 2 and 5 times a power of ten if these fit."""
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    for nice in ((1.0, 2.0, 5.0), (1.0,)):
        ticks = [each * 10.0**power for power in range(first, last + 1) for each in nice]
        begin = max(index for index, tick in enumerate(ticks) if index == 0 or tick <= low * (1 + 1e-9))
        end = min(index for index, tick in enumerate(ticks) if index == len(ticks) - 1 or tick >= high * (1 - 1e-9))
        ticks = ticks[begin : max(end, begin + 1) + 1]
        if len(ticks) <= num_ticks + 1:
            break
    ticks = ticks[:: max(1, (len(ticks) - 1) // num_ticks)] if len(ticks) > 2 * num_ticks else ticks
    return Axis(
        min(ticks[0], low), max(ticks[-1], high), tuple((tick, _format_power(tick)) for tick in ticks), math.log
    )


def _format_power(value: float) -> str:
    return f"{value:,.0f}" if 1 <= value < 1e7 else f"{value:.3g}".replace("e-0", "e-").replace("e+0", "e")


def _nice_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next(nice * power for nice in (1.0, 2.0, 5.0, 10.0) if nice * power >= rough * (1 - 1e-9))


def _tick_formatter(step: float, largest: float) -> Callable[[float], str]:
    # As many decimals as distinguish ticks, or exponents for long numbers.
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    if decimals > 4 or largest >= 1e7:
        return lambda value: f"{value:.3g}".replace("e-0", "e-").replace("e+0", "e") if value else "0"
    return lambda value: f"{value + 0.0:,.{decimals}f}"
