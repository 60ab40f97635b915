"""Does a change of settings train as before? Losses of pairs of runs, on the same samples in the same order. Pure but
for reading `steps.jsonl`. It knows nothing of speed.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final, Literal

from paceline.core.errors import PacelineError
from paceline.core.experiments.ladder import ParityResult
from paceline.core.interval import Interval, mean_of
from paceline.core.rundir import RunDir, read_lines
from paceline.core.units import count

TOLERANCE: Final = 0.02
"""Relative difference of the mean loss that counts as none.

A change that is exact on paper, such as another layout, sums in another order, and arithmetic in 16 bits rounds on top;
what follows drifts apart, more so with small batches. Measured by `paceline ladder` at a tenth of the learning rate:
another number of threads moves the loss by 0.2 % in eight steps of CIFAR-10 at batch 128, and by 1.4 % in ten of digits
at batch 32, where bfloat16 does by 1.5 %, and Adam in the place of SGD by 1 to 10 %.
"""
_UNPROVED: Final = "not proved to train alike"
_NO_LOSSES: Final = "no losses of the same steps were recorded after the warm-up (set log.every lower)"


def losses_of(here: RunDir, below: RunDir, after: int) -> tuple[float, float] | None:
    """Return the mean training losses of two runs, over the same steps, all after step `after`.

    A record of `steps.jsonl` is the mean since the one before it, and how often there is one may be what differs
    between the two: the steps are those between the first and the last that both have a record at. None where there
    are none, or where a loss is no number.
    """
    records = _records(here), _records(below)
    shared = sorted(step for step in {0, *records[0]} & {0, *records[1]} if step >= after)
    if len(shared) < 2:
        return None
    one, other = (_mean(each, shared[0], shared[-1]) for each in records)
    return (one, other) if math.isfinite(one) and math.isfinite(other) and other else None


def forbids(parity: ParityResult) -> bool:
    """Return whether losses speak against a setting: they differ, or their mean does as far as pairs can tell."""
    return parity.verdict == "differs" or abs(parity.gap.value) > parity.tolerance


def doubt(parity: ParityResult | None) -> str:
    """Return what is to be added to the reason for a setting that losses do not forbid; "" where they train alike."""
    if parity is None:
        return f"; {_UNPROVED}: {_NO_LOSSES}"
    return "" if parity.verdict == "same" else f"; {_UNPROVED}"


def _records(rundir: RunDir) -> dict[int, float]:
    """Return the losses of a run by the step that their record ends with; none where it was cut off, or is not ours."""
    try:
        return {int(record["step"]): float(record["loss"]) for record in read_lines(rundir.steps)}
    except (PacelineError, OSError, KeyError, TypeError, ValueError):
        return {}


def _mean(records: Mapping[int, float], begun: int, end: int) -> float:
    """Return the mean over steps `begun` + 1 to `end`, at both of which a record ends."""
    total = 0.0
    for before, step in pairwise(sorted({0, *records})):
        if begun <= before and step <= end:
            total += (step - before) * records[step]
    return total / (end - begun)


def parity_of(here: Sequence[float], below: Sequence[float]) -> ParityResult:
    """Judge losses of at least one pair of runs; both of a pair trained on the same samples, and all are positive.

    Two settings are equivalent where the whole interval of their difference is small (Schuirmann 1987, doi
    10.1007/BF01068419), and not where no difference is significant: few runs would then be proof.
    """
    assert len(here) == len(below), f"{len(here)} and {len(below)} losses are no pairs"
    gap = mean_of([one / other - 1 for one, other in zip(here, below, strict=True)])
    verdict = _verdict(gap)
    return ParityResult(
        loss=math.fsum(here) / len(here),
        loss_below=math.fsum(below) / len(below),
        gap=gap,
        tolerance=TOLERANCE,
        verdict=verdict,
        why=_why(gap, verdict),
    )


def _verdict(gap: Interval) -> Literal["same", "differs", "open"]:
    if gap.low is None or gap.high is None:
        return "open"
    if gap.low >= -TOLERANCE and gap.high <= TOLERANCE:
        return "same"
    return "differs" if gap.low > TOLERANCE or gap.high < -TOLERANCE else "open"


def _why(gap: Interval, verdict: str) -> str:
    pairs = count(gap.n, "pair")
    if gap.low is None or gap.high is None:
        return f"loss {gap.value:+.2%} in one pair, which does not tell how much that scatters"
    found = f"loss {gap.value:+.2%} ({gap.low:+.2%} to {gap.high:+.2%}) in {pairs}"
    match verdict:
        case "same":
            return f"{found}: within {TOLERANCE:.0%}"
        case "differs":
            return f"{found}: beyond {TOLERANCE:.0%}"
    return f"{found}: too few to tell whether within {TOLERANCE:.0%}"
