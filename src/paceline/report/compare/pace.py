"""Why two groups differ in images/s: hardware, what they were asked, or nothing but noise. Pure."""

from collections.abc import Sequence
from typing import Final

from paceline.core.interval import Interval
from paceline.core.learning import only_learning
from paceline.report.compare.code import other
from paceline.report.compare.read import Trained
from paceline.report.compare.result import PaceBy
from paceline.report.compare.settings import differing

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
"""Settings that go along with more or other hardware, so a ratio of images/s is still credited to it."""


def pace_by(runs: Sequence[Trained], reference: Sequence[Trained], ratio: Interval) -> PaceBy:
    """Return what makes the `ratio` of two groups' images/s, as `GroupResult.pace_by` has it."""
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
    """Whether two runs are known to have had other hardware."""
    here, there = run.hardware, reference.hardware
    return any(here[name] != there[name] for name in here.keys() & there.keys())


def _is_scatter(runs: Sequence[Trained], reference: Sequence[Trained], ratio: Interval) -> bool:
    """Whether a ratio is no larger than it would be of equals: by its interval, or of single runs by their windows.

    These are the steady ones of `throughput.spread`, so a ratio that has another cause, such as many evaluations on the
    way, lies outside of what they can make of it.
    """
    if ratio.low is not None and ratio.high is not None:
        return ratio.low <= 1 <= ratio.high
    ours, theirs = _spread(runs), _spread(reference)
    if ours is None or theirs is None:
        return False
    low, high = ours[0] / theirs[1], ours[1] / theirs[0]
    return low <= 1 <= high and low <= ratio.value <= high


def _spread(runs: Sequence[Trained]) -> tuple[float, float] | None:
    """Return between which images/s most windows of a group's runs lie; None where one has measured none."""
    rates = [run.result.throughput if run.result is not None else None for run in runs]
    known = [rate.spread for rate in rates if rate is not None and rate.n and rate.spread[0] > 0]
    if len(known) < len(runs):
        return None
    return min(low for low, _ in known), max(high for _, high in known)
