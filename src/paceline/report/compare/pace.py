"""Find the cause of a difference in images/s: hardware, settings or noise. Pure."""

from collections.abc import Sequence
from typing import Final

from paceline.core.interval import Interval
from paceline.core.learning import only_learning
from paceline.report.compare.code import other
from paceline.report.compare.read import Trained
from paceline.report.compare.result import PaceBy
from paceline.report.compare.settings import differing

# Settings that change with the hardware, so that it still gets the credit for images/s.
_SCALED_WITH_HARDWARE: Final = (
    "device",
    "ranks",
    "data.batch_size",
    "data.workers",
    "parallel.",
    "checkpoint.",
    "log.",
    "measure.",
    "torch",
)


def pace_by(runs: Sequence[Trained], reference: Sequence[Trained], ratio: Interval) -> PaceBy:
    """Return the cause of the `ratio` of two groups' images/s, as in `GroupResult.pace_by`."""
    if any(run.starved is not None for run in (*runs, *reference)):
        return "starved"
    paths = differing([runs[0].settings, reference[0].settings])
    if any(_is_other(run, each) for run in runs for each in reference):
        with_hardware = (only_learning(path) or path.startswith(_SCALED_WITH_HARDWARE) for path in paths)
        return "hardware" if all(with_hardware) else "mixed"
    is_other_code = other([run.code for run in runs], [run.code for run in reference])
    if paths and all(map(only_learning, paths)) and not is_other_code:
        return "noise"
    return "scatter" if _is_scatter(runs, reference, ratio) else "software"


def _is_other(run: Trained, reference: Trained) -> bool:
    ours, theirs = run.hardware, reference.hardware
    return any(ours[name] != theirs[name] for name in ours.keys() & theirs.keys())


def _is_scatter(runs: Sequence[Trained], reference: Sequence[Trained], ratio: Interval) -> bool:
    # By the interval, or for single runs by the spread of their windows.
    if ratio.low is not None and ratio.high is not None:
        return ratio.low <= 1 <= ratio.high
    ours, theirs = _spread(runs), _spread(reference)
    if ours is None or theirs is None:
        return False
    # Steady windows cannot explain a ratio with another cause, such as many evaluations before the target.
    low, high = ours[0] / theirs[1], ours[1] / theirs[0]
    return low <= 1 <= high and low <= ratio.value <= high


def _spread(runs: Sequence[Trained]) -> tuple[float, float] | None:
    rates = [run.result.throughput if run.result is not None else None for run in runs]
    known = [rate.spread for rate in rates if rate is not None and rate.n and rate.spread[0] > 0]
    if len(known) < len(runs):
        return None
    return min(low for low, _ in known), max(high for _, high in known)
