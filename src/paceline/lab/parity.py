"""Compare training losses of pairs of runs on the same samples in the same order. Pure, but reads `steps.jsonl`."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final, Literal

from paceline.core.errors import PacelineError
from paceline.core.experiments.ladder import ParityResult
from paceline.core.interval import Interval, mean_interval
from paceline.core.rundir import RunDir, read_lines
from paceline.core.units import count

LOSS_TOLERANCE: Final = 0.02
"""Relative difference of the mean loss that counts as equal.

Even an exact change, such as another memory format, sums in another order, and 16-bit arithmetic rounds on top; runs
then drift apart, more so with small batches. Measured by `paceline ladder` at a tenth of the learning rate: another
number of threads moves the loss by 0.2 % in eight steps of CIFAR-10 at batch 128 and by 1.4 % in ten steps of digits at
batch 32, where bfloat16 moves it by 1.5 % and Adam instead of SGD by 1 to 10 %.
"""
_UNPROVED: Final = "not proved to train alike"
_NO_LOSSES: Final = "no losses of the same steps were recorded after the warm-up (set log.every lower)"


def read_mean_losses(candidate: RunDir, baseline: RunDir, after: int) -> tuple[float, float] | None:
    """Return the mean training losses of two runs over the same steps, all after step `after`.

    None if there are no such steps, or if a loss is NaN or infinite.
    """
    # A record is the mean since the previous one, and the two runs may log at different steps, so compare between the
    # first and last step at which both have a record.
    records = _read_losses(candidate), _read_losses(baseline)
    shared = sorted(step for step in {0, *records[0]} & {0, *records[1]} if step >= after)
    if len(shared) < 2:
        return None
    first, second = (_mean_loss(each, shared[0], shared[-1]) for each in records)
    return (first, second) if math.isfinite(first) and math.isfinite(second) and second else None


def is_disqualifying(parity: ParityResult) -> bool:
    """Return whether losses rule out a setting: they differ, or their mean difference exceeds the tolerance."""
    return parity.verdict == "differs" or abs(parity.gap.value) > parity.tolerance


def format_parity_caveat(parity: ParityResult | None) -> str:
    """Return a caveat to append to the reason for a setting; "" if both train alike."""
    if parity is None:
        return f"; {_UNPROVED}: {_NO_LOSSES}"
    return "" if parity.verdict == "same" else f"; {_UNPROVED}"


def _read_losses(rundir: RunDir) -> dict[int, float]:
    """Return the losses of a run by the last step of each record; empty if the file is truncated or invalid."""
    try:
        return {int(record["step"]): float(record["loss"]) for record in read_lines(rundir.steps)}
    except (PacelineError, OSError, KeyError, TypeError, ValueError):
        return {}


def _mean_loss(records: Mapping[int, float], start: int, end: int) -> float:
    """Return the mean loss over steps `begun` + 1 to `end`, at both of which a record ends."""
    total = 0.0
    for before, step in pairwise(sorted({0, *records})):
        if start <= before and step <= end:
            total += (step - before) * records[step]
    return total / (end - start)


def assess_parity(candidates: Sequence[float], baselines: Sequence[float]) -> ParityResult:
    """Assess the positive losses of at least one pair of runs, both on the same samples.

    Two settings are equivalent if the whole interval of their difference is small (Schuirmann 1987, doi
    10.1007/BF01068419).
    """
    assert len(candidates) == len(baselines), f"{len(candidates)} and {len(baselines)} losses are no pairs"
    # A non-significant difference is no proof of equivalence: few runs would then prove anything.
    gap = mean_interval([candidate / baseline - 1 for candidate, baseline in zip(candidates, baselines, strict=True)])
    verdict = _classify_gap(gap)
    return ParityResult(
        loss=math.fsum(candidates) / len(candidates),
        loss_below=math.fsum(baselines) / len(baselines),
        gap=gap,
        tolerance=LOSS_TOLERANCE,
        verdict=verdict,
        why=_explain_gap(gap, verdict),
    )


def _classify_gap(gap: Interval) -> Literal["same", "differs", "open"]:
    if gap.low is None or gap.high is None:
        return "open"
    if gap.low >= -LOSS_TOLERANCE and gap.high <= LOSS_TOLERANCE:
        return "same"
    return "differs" if gap.low > LOSS_TOLERANCE or gap.high < -LOSS_TOLERANCE else "open"


def _explain_gap(gap: Interval, verdict: str) -> str:
    pairs = count(gap.n, "pair")
    if gap.low is None or gap.high is None:
        return f"loss {gap.value:+.2%} in one pair, so its scatter is unknown"
    measured = f"loss {gap.value:+.2%} ({gap.low:+.2%} to {gap.high:+.2%}) in {pairs}"
    match verdict:
        case "same":
            return f"{measured}: within {LOSS_TOLERANCE:.0%}"
        case "differs":
            return f"{measured}: beyond {LOSS_TOLERANCE:.0%}"
    return f"{measured}: too few to decide whether within {LOSS_TOLERANCE:.0%}"
