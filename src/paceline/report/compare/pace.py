"""Find the cause of a difference in images/s: hardware, settings or noise. Pure."""

from collections.abc import Sequence
from typing import Final

from paceline.core.interval import Interval
from paceline.core.learning import changes_result_only
from paceline.report.compare.code import describe_other_code
from paceline.report.compare.read import ComparedRun
from paceline.report.compare.result import SpeedCause
from paceline.report.compare.settings import find_differing_settings

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


def find_speed_cause(runs: Sequence[ComparedRun], reference: Sequence[ComparedRun], ratio: Interval) -> SpeedCause:
    """Return the cause of the `ratio` of two groups' images/s, as in `GroupResult.pace_by`."""
    if any(run.starved_share is not None for run in (*runs, *reference)):
        return "starved"
    paths = find_differing_settings([runs[0].settings, reference[0].settings])
    if any(_has_other_hardware(run, each) for run in runs for each in reference):
        with_hardware = (changes_result_only(path) or path.startswith(_SCALED_WITH_HARDWARE) for path in paths)
        return "hardware" if all(with_hardware) else "mixed"
    is_other_code = describe_other_code([run.code for run in runs], [run.code for run in reference])
    if paths and all(map(changes_result_only, paths)) and not is_other_code:
        return "noise"
    return "scatter" if _is_within_noise(runs, reference, ratio) else "software"


def _has_other_hardware(run: ComparedRun, reference: ComparedRun) -> bool:
    ours, theirs = run.hardware, reference.hardware
    return any(ours[name] != theirs[name] for name in ours.keys() & theirs.keys())


def _is_within_noise(runs: Sequence[ComparedRun], reference: Sequence[ComparedRun], ratio: Interval) -> bool:
    # By the interval, or for single runs by the spread of their windows.
    if ratio.low is not None and ratio.high is not None:
        return ratio.low <= 1 <= ratio.high
    ours, theirs = _throughput_range(runs), _throughput_range(reference)
    if ours is None or theirs is None:
        return False
    # Steady windows cannot explain a ratio with another cause, such as many evaluations before the target.
    low, high = ours[0] / theirs[1], ours[1] / theirs[0]
    return low <= 1 <= high and low <= ratio.value <= high


def _throughput_range(runs: Sequence[ComparedRun]) -> tuple[float, float] | None:
    rates = [run.result.throughput if run.result is not None else None for run in runs]
    known = [rate.spread for rate in rates if rate is not None and rate.n and rate.spread[0] > 0]
    if len(known) < len(runs):
        return None
    return min(low for low, _ in known), max(high for _, high in known)
