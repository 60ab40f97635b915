"""Images a second, with the spread that a speed claim needs. Pure: seconds in, numbers out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

WINDOW_STEPS: Final = 10


@dataclass(frozen=True)
class Throughput:
    """`images_per_s` over all counted steps, waiting for data included.

    `spread` is the (10th, 90th) percentile of images/s over `n` consecutive windows of up to 10 steps;
    `excluded_s` seconds of warm-up and pauses are in neither. A run with no counted step has 0 in all of them.
    """

    images_per_s: float
    spread: tuple[float, float]
    n: int
    excluded_s: float


def throughput(step_s: Sequence[float], images_per_step: int, excluded_s: float) -> Throughput:
    """Return the throughput of steps that took `step_s` seconds each and `images_per_step` images over all ranks.

    No counted step (a run shorter than its warm-up) gives 0 images/s, a spread of (0, 0) and n = 0.
    """
    wall_s = float(sum(step_s))
    if wall_s <= 0:
        return Throughput(0.0, (0.0, 0.0), 0, excluded_s)
    windows = [step_s[start : start + WINDOW_STEPS] for start in range(0, len(step_s), WINDOW_STEPS)]
    rates = [images_per_step * len(window) / sum(window) for window in windows if sum(window) > 0]
    low, high = np.percentile(rates, [10, 90])
    return Throughput(images_per_step * len(step_s) / wall_s, (float(low), float(high)), len(rates), excluded_s)
