"""Suggest a learning rate from range tests: pool the losses of several runs, smooth them, and apply a rule. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

SMOOTHING_DECADES: Final = 0.25
"""Standard deviation of the smoothing kernel, in decades of the learning rate."""
MIN_DROP: Final = 0.02
"""Fall of the smoothed loss, relative to its start, below which a curve is flat."""
EDGE_DECADES: Final = 0.5
"""Distance of the minimum from the end of the range, in decades, from which the range is too short."""
RULE: Final = "rule"
MIN_STEPS: Final = 10


@dataclass(frozen=True)
class Suggestion:
    """The suggested `lr`, None if the curve names none, on the smoothed losses of the first steps of all runs.

    `caution` says why the suggestion may mislead, and what to do, or "".
    """

    lr: float | None
    smoothed: tuple[float, ...]
    caution: str = ""


def list_rates(low: float, high: float, steps: int) -> tuple[float, ...]:
    """Return the learning rate of each step of a range test: from `low` to `high` by a constant factor."""
    return tuple(low * (high / low) ** (step / max(1, steps - 1)) for step in range(steps))


def suggest_lr(rates: Sequence[float], runs: Sequence[Sequence[float]]) -> Suggestion:
    """Suggest a learning rate from the losses of each run at the first `rates`."""
    length = min(len(losses) for losses in runs)
    logarithms = np.log10(np.asarray(rates[:length]))
    pooled = np.mean([losses[:length] for losses in runs], axis=0)
    smoothed = smooth(logarithms, pooled)
    return Suggestion(None, tuple(smoothed.tolist()))


def smooth(logarithms: NDArray[np.float64], losses: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return a local linear fit of `losses` over `logarithms`, both float64 [N], with a Gaussian kernel.

    A line, in place of a mean, has no bias at the ends (Fan 1992, doi 10.1080/01621459.1992.10476255).
    """
    distance = logarithms[None, :] - logarithms[:, None]
    weights = np.exp(-0.5 * (distance / SMOOTHING_DECADES) ** 2)
    s0, s1, s2 = (np.sum(weights * distance**power, axis=1) for power in range(3))
    t0, t1 = np.sum(weights * losses, axis=1), np.sum(weights * distance * losses, axis=1)
    fitted: NDArray[np.float64] = (s2 * t0 - s1 * t1) / (s0 * s2 - s1**2)
    return fitted


def round_rate(rate: float) -> float:
    """Return a rate with two digits: the rounding of losses on another number of ranks must not show."""
    return float(f"{rate:.1e}") if math.isfinite(rate) else rate
