"""How often to save, and what that costs: formulas, seconds in and seconds or shares out. Nothing is measured here.

Throughout, `stall_s` (C) is how long training stands still for a checkpoint, `write_s` (W) how long after the stall
it takes until the checkpoint is safe on disk, `restart_s` (R) the time from a failure to the first new step,
`mtbf_s` (M) the mean time between failures, and `work_s` (T) the training between two checkpoints. Failures are
taken to come at random, at a constant rate, at any time: during a checkpoint and a restart too.
"""

import math
from dataclasses import dataclass
from typing import Final

_CONFIDENCE: Final = 0.95
_RULE_OF_THREE: Final = 3.0  # -ln(1 - 0.95), rounded as is usual (Hanley and Lippman-Hand 1983)
_SIGNAL_JITTER_S: Final = 60.0  # a signal may come so much early (man sbatch, --signal)


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
    """Return Daly's interval, or the time of a write if that is longer: there is never more than one write at a
    time."""
    return max(daly_interval(stall_s, mtbf_s), write_s)


def efficiency(work_s: float, stall_s: float, restart_s: float, mtbf_s: float, *, write_s: float = 0.0) -> float:
    """Return the share of the wall clock that is useful work, in [0, 1].

    E = T / (M · e^(R/M) · (e^((T + C)/M) - 1)), exact for exponential failures (Daly 2006). A background write extends
    the time at risk by `write_s`, so each failure loses that much more: it is added to R, which is exact to the first
    order in W/M.
    """
    assert work_s > 0 and mtbf_s > 0, f"work_s: {work_s}, mtbf_s: {mtbf_s}"
    try:
        return work_s / (mtbf_s * math.exp((restart_s + write_s) / mtbf_s) * math.expm1((work_s + stall_s) / mtbf_s))
    except OverflowError:
        return 0.0


def interval_steps(work_s: float, step_s: float) -> int:
    """Return `work_s` as a number of steps of `step_s` seconds, at least one."""
    return max(1, round(work_s / step_s))


def signal_lead(step_s: float, save_s: float) -> float:
    """Return how many seconds before its end a job needs its signal: the scheduler's jitter, a step, and two saves."""
    return _SIGNAL_JITTER_S + step_s + 2 * save_s


@dataclass(frozen=True)
class Mtbf:
    """Mean time between failures in seconds, with its 95 % confidence interval.

    `mean_s` and `high_s` are infinite if nothing has failed.
    """

    mean_s: float
    low_s: float
    high_s: float


def observed_mtbf(num_failures: int, up_s: float) -> Mtbf:
    """Estimate the mean time between failures from `num_failures` failures in `up_s` seconds of uptime.

    M = t/k, between 2t/χ²(0.975; 2k + 2) and 2t/χ²(0.025; 2k): the exact interval of a Poisson rate (Garwood 1936, doi
    10.1093/biomet/28.3-4.437). Without failures M is at least t/3, one-sided.
    """
    if num_failures == 0:
        return Mtbf(math.inf, up_s / _RULE_OF_THREE, math.inf)
    from scipy.special import gammaincinv  # type: ignore[import-untyped]  # loading it takes a tenth of a second

    # Half of the quantile of χ² with 2a degrees of freedom is that of the gamma distribution of shape a.
    tail = (1 - _CONFIDENCE) / 2
    low_s = up_s / float(gammaincinv(num_failures + 1, 1 - tail))
    high_s = up_s / float(gammaincinv(num_failures, tail))
    return Mtbf(up_s / num_failures, low_s, high_s)
