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
MAX_LOSS: Final = 1.05
"""Losses above this many times the first ones are cut there: a single step or a diverging run then weighs little."""
MIN_DROP: Final = 0.02
"""Fall of the smoothed loss, relative to the first losses, below which a curve is flat."""
MAX_DISAGREEMENT: Final = 3.0
"""Ratio of the rates that single runs suggest above which the suggestion has a caution."""
MIN_STEPS_PER_DECADE: Final = 10
"""Fewer steps while the rate rises tenfold are too few to learn at each: the suggestion may be ten times too low."""
MIN_STEPS: Final = 10
"""Steps that every run must have before its loss diverges."""
SERIES: Final = (1, 1.5, 2, 3, 5, 7, 10)
"""Suggestions are one of these times a power of ten: a range test is no more accurate than their distance."""
_ROUNDED: Final = (
    "rounded to 1, 1.5, 2, 3, 5 or 7 times a power of ten. The guide to learning rates says how this rule was chosen."
)
RULE: Final = (
    "The suggestion is the highest rate, past the minimum of the smoothed loss, before the loss has risen by "
    f"{100 * MAX_RISE:.0f} % of its fall, {_ROUNDED}"
)
"""Chosen among others by the accuracy of training at their suggestions, on five tasks (benchmarks/lr_find.py)."""
PRETRAINED_SHARE: Final = 1 / 3
"""Suggestion for pretrained weights that suit the task, as a share of the rate at which the loss is lowest."""
PRETRAINED_FALL: Final = 0.25
"""Fall of the smoothed loss during the test, as a share of the first losses, that shows that weights suit the task."""
PRETRAINED_RULE: Final = (
    f"As the loss of the pretrained model fell by more than {100 * PRETRAINED_FALL:.0f} % within the test, the "
    f"suggestion is a third of the rate at which the smoothed loss is lowest, {_ROUNDED}"
)
"""Features that separate the classes from the start gain nothing from a high rate: its first steps make the weights of
a classifier too large, or destroy the features.
"""


@dataclass(frozen=True)
class Suggestion:
    """The suggested `lr`, None if the curve names none, on the smoothed losses of the first steps of all runs.

    `caution` says why the suggestion may mislead, and what to do, or "", and `rule` how it was chosen.
    """

    lr: float | None
    smoothed: tuple[float, ...]
    caution: str = ""
    rule: str = RULE


def list_rates(low: float, high: float, steps: int) -> tuple[float, ...]:
    """Return the learning rate of each step of a range test: from `low` to `high` by a constant factor."""
    return tuple(low * (high / low) ** (step / max(1, steps - 1)) for step in range(steps))


def suggest_lr(rates: Sequence[float], runs: Sequence[Sequence[float]], *, is_pretrained: bool = False) -> Suggestion:
    """Suggest a learning rate from the losses of each run at the first `rates`, for all runs together.

    The suggestion states its rule: `RULE`, or `PRETRAINED_RULE` for pretrained weights that suit the task.
    """
    length = max(len(losses) for losses in runs)
    pooled = np.mean([cut_losses(losses, length) for losses in runs], axis=0)
    smoothed = smooth(np.log10(np.asarray(rates[:length])), pooled)
    lowest = int(np.argmin(smoothed))
    drop = float(smoothed[: lowest + 1].max() - smoothed[lowest])
    shown = tuple(smoothed.tolist())
    low, high = rates[0], rates[-1]
    if drop < MIN_DROP * abs(find_first(pooled)):
        if length < len(rates):
            advice = f"the loss rises from the first steps on (try --from {low / 1000:.0e} --to {high / 1000:.0e})"
        else:
            advice = f"the loss hardly changes over all rates (try --to {high * 1000:.0e}, or more --steps)"
        return Suggestion(None, shown, advice)
    suits_task = is_pretrained and drop > PRETRAINED_FALL * abs(find_first(pooled))
    limit = smoothed[lowest] + MAX_RISE * drop
    # Steps of the test, without interpolation: the last bits of losses then hardly ever show.
    last = lowest
    while not suits_task and last + 1 < length and smoothed[last + 1] <= limit:
        last += 1
    best = PRETRAINED_SHARE * rates[lowest] if suits_task else rates[last]
    caution = ""
    if last == len(rates) - 1:
        caution = f"the loss still falls at the highest rate (try --to {high * 100:.0e})"
    alone = [[losses] for losses in runs if len(runs) > 1]
    single = [lr for run in alone if (lr := suggest_lr(rates, run, is_pretrained=is_pretrained).lr)]
    if not caution and single and max(single) > MAX_DISAGREEMENT * min(single):
        caution = f"single runs suggest {min(single):g} to {max(single):g} (try more --steps or --repeats)"
    if not caution and len(rates) <= MIN_STEPS_PER_DECADE * math.log10(high / low):
        caution = (
            f"fewer than {MIN_STEPS_PER_DECADE} steps while the rate rises tenfold suggest too low a rate (try "
            f"--steps {math.ceil(MIN_STEPS_PER_DECADE * math.log10(high / low)) + 1}, or a smaller range)"
        )
    return Suggestion(round_rate(best), shown, caution, PRETRAINED_RULE if suits_task else RULE)


def find_first(losses: NDArray[np.float64] | Sequence[float]) -> float:
    """Return the median of the first tenth of the losses, when the rate is too low to change them."""
    return float(np.median(losses[: max(3, len(losses) // 10)]))


def cut_losses(losses: Sequence[float], length: int) -> NDArray[np.float64]:
    """Return `losses` cut at the largest that count, float64 [length]; steps after a run diverged have that value."""
    first = find_first(losses)
    limit = first + (MAX_LOSS - 1) * abs(first)
    return np.append(np.minimum(losses, limit), np.full(length - len(losses), limit))


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
    """Return the nearest rate of `SERIES`, by ratio: the rounding of losses on another number of ranks rarely shows."""
    exponent = math.floor(math.log10(rate))
    nearest = min(SERIES, key=lambda each: abs(math.log10(each) + exponent - math.log10(rate)))
    return float(f"{nearest:g}e{exponent}")
