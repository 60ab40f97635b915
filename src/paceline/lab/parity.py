"""Does a change of settings train as before? Losses of pairs of runs, on the same samples in the same order. Pure but
for reading `steps.jsonl`. It knows nothing of speed.
"""

import math
from collections.abc import Sequence
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


def mean_loss(rundir: RunDir, after: int) -> float | None:
    """Return the mean training loss of the steps after step `after`, as far as they are in records of their own.

    A record of `steps.jsonl` is the mean since the one before it, so one that began earlier is left out. None where
    there is none, or where its loss is no number.
    """
    total, num_steps, begun = 0.0, 0, 0
    try:
        for record in read_lines(rundir.steps):
            step, loss = int(record["step"]), float(record["loss"])
            if begun >= after:
                total += (step - begun) * loss
                num_steps += step - begun
            begun = step
    except (PacelineError, OSError, KeyError, TypeError, ValueError):  # it was cut off, or is not ours
        return None
    mean = total / num_steps if num_steps else math.nan
    return mean if math.isfinite(mean) else None


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
