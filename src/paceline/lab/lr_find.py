"""Suggest a learning rate from range tests: pool the losses of several runs, smooth them, and apply a rule. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

SMOOTHING_DECADES: Final = 0.3
"""Standard deviation of the smoothing kernel, in decades of the learning rate."""
MAX_RISE: Final = 0.1
"""Rise of the smoothed loss past its minimum, as a share of its whole fall, that the suggestion may have."""
MAX_LOSS: Final = 1.2
"""Losses above this many times the first ones are cut there, as those of a diverging run would move the minimum."""
MIN_DROP: Final = 0.02
"""Fall of the smoothed loss, relative to the first losses, below which a curve is flat."""
MIN_STEPS: Final = 10
"""Steps that every run must have before its loss diverges."""
RULE: Final = (
    "The suggestion is the highest rate, past the minimum of the smoothed loss, before the loss has risen by "
    f"{100 * MAX_RISE:.0f} % of its fall. The guide to learning rates compares this rule with others."
)
"""Chosen among others by the accuracy of training at their suggestions, on five tasks (benchmarks/lr_find.py)."""


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
    """Suggest a learning rate from the losses of each run at the first `rates`, for all runs together (see `RULE`)."""
    length = min(len(losses) for losses in runs)
    logarithms = np.log10(np.asarray(rates[:length]))
    pooled = np.mean([losses[:length] for losses in runs], axis=0)
    first = float(np.median(pooled[: max(3, length // 10)]))
    smoothed = smooth(logarithms, np.minimum(pooled, MAX_LOSS * first))
    lowest = int(np.argmin(smoothed))
    drop = float(smoothed[: lowest + 1].max() - smoothed[lowest])
    shown = tuple(smoothed.tolist())
    low, high = rates[0], rates[-1]
    if drop < MIN_DROP * abs(first):
        if length < len(rates):
            advice = f"the loss rises from the first steps on (try --from {low / 1000:.0e} --to {high / 1000:.0e})"
        else:
            advice = f"the loss hardly changes over all rates (try --to {high * 1000:.0e}, or more --steps)"
        return Suggestion(None, shown, advice)
    limit = smoothed[lowest] + MAX_RISE * drop
    # A step of the test, without interpolation: the last bits of losses then hardly ever show.
    best = lowest
    while best + 1 < length and smoothed[best + 1] <= limit:
        best += 1
    caution = ""
    if best == len(rates) - 1:
        caution = f"the loss still falls at the highest rate (try --to {high * 100:.0e})"
    elif lowest == 0:
        caution = f"the loss is lowest at the lowest rate (try --from {low / 100:.0e})"
    return Suggestion(round_rate(rates[best]), shown, caution)


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
