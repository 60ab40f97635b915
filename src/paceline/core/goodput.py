"""Formulas for the checkpoint interval and its cost, in seconds.

`stall_s` (C) is how long training stops for a checkpoint, `write_s` (W) the time from then until it is on disk,
`restart_s` (R) the time from a failure to the first new step, `mtbf_s` (M) the mean time between failures, and `work_s`
(T) the training between two checkpoints. Failures are a Poisson process, also during checkpoints and restarts.
"""

import math
from dataclasses import dataclass
from typing import Final

_CONFIDENCE: Final = 0.95
_RULE_OF_THREE: Final = 3.0  # -ln(1 - 0.95), rounded as is usual (Hanley and Lippman-Hand 1983)
_SIGNAL_JITTER_S: Final = 60.0  # Slurm may send the signal this much early (man sbatch, --signal)


def young_interval(stall_s: float, mtbf_s: float) -> float:
    """Return Young's interval T = √(2CM) in seconds of work (Young 1974, doi 10.1145/361147.361115)."""
    return math.sqrt(2 * stall_s * mtbf_s)


def daly_interval(stall_s: float, mtbf_s: float) -> float:
    """Return Daly's interval in seconds of work (Daly 2006, doi 10.1016/j.future.2004.11.016).

    T = √(2CM) · [1 + ⅓ √(C / 2M) + C / 18M] - C for C < 2M, else M.
    """
    if stall_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = stall_s / (2 * mtbf_s)
    return young_interval(stall_s, mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall_s


def best_interval(stall_s: float, write_s: float, mtbf_s: float) -> float:
    """Return Daly's interval in seconds, at least `write_s`."""
    return max(daly_interval(stall_s, mtbf_s), write_s)  # only one write runs at a time


def efficiency(work_s: float, stall_s: float, restart_s: float, mtbf_s: float, *, write_s: float = 0.0) -> float:
    """Return the share of the wall clock that is useful work, in [0, 1].

    E = T / (M · e^(R/M) · (e^((T + C)/M) - 1)), exact for exponential failures (Daly 2006).
    """
    assert work_s > 0 and mtbf_s > 0, f"work_s: {work_s}, mtbf_s: {mtbf_s}"
    # A failure during a background write loses that much more work. Adding W to R is exact to first order in W/M.
    try:
        return work_s / (mtbf_s * math.exp((restart_s + write_s) / mtbf_s) * math.expm1((work_s + stall_s) / mtbf_s))
    except OverflowError:
        return 0.0


def interval_steps(work_s: float, step_s: float) -> int:
    """Return `work_s` as a number of steps of `step_s` seconds, at least one."""
    return max(1, round(work_s / step_s))


def signal_lead(step_s: float, save_s: float) -> float:
    """Return how many seconds before its time limit a job needs its signal."""
    # A step and a background save may have just begun when the signal arrives; the final save follows them.
    return _SIGNAL_JITTER_S + step_s + 2 * save_s


@dataclass(frozen=True)
class Mtbf:
    """Mean time between failures in seconds with its 95 % confidence interval; infinite means no failure was seen."""

    mean_s: float
    low_s: float
    high_s: float


def observed_mtbf(num_failures: int, up_s: float) -> Mtbf:
    """Estimate the mean time between failures from `num_failures` failures in `up_s` seconds of uptime.

    M = t/k, between 2t/χ²(0.975; 2k + 2) and 2t/χ²(0.025; 2k): the exact interval of a Poisson rate (Garwood 1936, doi
    10.1093/biomet/28.3-4.437). Without failures M is at least t/3 (one-sided).
    """
    if num_failures == 0:
        return Mtbf(math.inf, up_s / _RULE_OF_THREE, math.inf)
    from scipy.special import gammaincinv  # type: ignore[import-untyped]  # loading it takes a tenth of a second

    # Half of the quantile of χ² with 2a degrees of freedom is that of the gamma distribution of shape a.
    tail = (1 - _CONFIDENCE) / 2
    low_s = up_s / float(gammaincinv(num_failures + 1, 1 - tail))
    high_s = up_s / float(gammaincinv(num_failures, tail))
    return Mtbf(up_s / num_failures, low_s, high_s)
