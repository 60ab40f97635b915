"""Write the findings of a comparison as sentences: time to target, its causes, and accuracy. Pure."""

from collections.abc import Iterator, Sequence
from typing import Final

from paceline.core.interval import Interval
from paceline.core.units import accuracy, count, number, seconds
from paceline.report.compare.result import GroupResult

_REACHED_SUFFIX: Final = " that reached the target"
_EVALUATED_SUFFIX: Final = " that was evaluated"


def build_sentences(groups: Sequence[GroupResult], target: float | None, metric: str) -> Iterator[str]:
    """Yield sentences on each group but the first, compared with the first."""
    reference, *others = groups
    if not others:
        runs = count(len(reference.runs), "run")
        why = "there is only one run" if len(reference.runs) == 1 else f"{runs} differ only in the seed"
        yield f"There is nothing to compare: {why} (name a run with other settings)."
    for group in others:
        if target is not None:
            yield _target_sentence(group, reference, format_target(target))
        yield from _accuracy_sentences(group, reference, metric)


def format_target(target: float) -> str:
    """Return a target accuracy as text: `75 %`, `97.22 %`."""
    return accuracy(target).replace(".00 %", " %")


def format_metric(metric: str) -> str:
    """Return the name of an accuracy metric: `top-1`."""
    return metric.replace("_", " ").replace("top", "top-")


def _target_sentence(group: GroupResult, reference: GroupResult, target: str) -> str:
    # Such as: A reaches 75 % in 0.14 of the time of B.
    if group.best is None:
        return f"{_capitalize_name(group.name)} was not evaluated: its time to {target} is unknown."
    if not group.reached:
        return f"{_capitalize_name(group.name)} does not reach {target}: its best is {accuracy(group.best.value)}."
    if group.speedup is None:
        took = f" (after {seconds(group.to_target_s.value)})" if group.to_target_s else ""
        reason = "but the time of {} is unknown" if reference.reached else "which {} does not reach"
        return f"{_capitalize_name(group.name)} reaches {target}{took}, {reason.format(reference.name)}."
    fraction = _invert_ratio(group.speedup)
    times = "of" if fraction.value < 1 else "times"
    finding = f"{_capitalize_name(group.name)} reaches {target} in {number(fraction.value)} {times} the time of {reference.name}"
    ours, theirs = (sum(run.to_target_s is not None for run in each.runs) for each in (group, reference))
    interval = _bounds_text(fraction) or f" ({_no_interval_reason(group, reference, ours, theirs, _REACHED_SUFFIX)})"
    return f"{finding}{interval}: {_split_speedup(group)}"


def _split_speedup(group: GroupResult) -> str:
    assert group.speedup is not None and group.hardware is not None and group.statistical is not None
    hardware, statistical = f"{group.hardware.value:.2f}x", f"{group.statistical.value:.2f}x"
    made = {
        "hardware": f"{hardware} by hardware (images/s) times {statistical} by statistics (images needed)",
        "mixed": f"{hardware} by images/s (other hardware and other settings) times {statistical} by images needed",
        "starved": f"{hardware} by images/s, unreliable as other processes held the cores (CPU-starved), "
        f"times {statistical} by images needed",
        "noise": f"{hardware} by images/s, which is noise as no differing setting affects speed, times "
        f"{statistical} by images needed",
        "scatter": f"{hardware} by images/s, which is within noise, times {statistical} by images needed",
    }.get(shown_speed_cause(group), f"{hardware} by images/s times {statistical} by images needed")
    return f"{group.speedup.value:.2f}x as fast, {made}."


def shown_speed_cause(group: GroupResult) -> str:
    """Return the cause of a group's ratio of images/s, "" if it displays as 1.00x and needs no explanation."""
    is_shown = group.hardware is not None and f"{group.hardware.value:.2f}" != "1.00"
    return group.pace_by if group.pace_by is not None and (is_shown or group.pace_by in ("hardware", "starved")) else ""


def _bounds_text(fraction: Interval) -> str:
    if fraction.low is None or fraction.high is None:
        return ""
    bounds = f"{number(fraction.low)} to {number(fraction.high)}"
    is_open = not (fraction.is_below(1) or fraction.is_above(1))
    return f" ({bounds}{', so the times may be equal' if is_open else ''})"


def _accuracy_sentences(group: GroupResult, reference: GroupResult, metric: str) -> Iterator[str]:
    if group.gap is None or group.accuracy is None:
        return
    gap, metric_name = group.gap, format_metric(metric)
    direction = "above" if gap.value >= 0 else "below"
    finding = (
        f"{_capitalize_name(group.name)} ends at {accuracy(group.accuracy.value)} {metric_name}, "
        f"{100 * abs(gap.value):.2f} points {direction} {reference.name}"
    )
    if gap.low is None or gap.high is None:
        ours, theirs = (sum(run.accuracy is not None for run in each.runs) for each in (group, reference))
        yield f"{finding} ({_no_interval_reason(group, reference, ours, theirs, _EVALUATED_SUFFIX)})."
        return
    bounds = f"{100 * gap.low:+.2f} to {100 * gap.high:+.2f}"
    is_open = not (gap.is_below(0) or gap.is_above(0))
    yield f"{finding} ({bounds}{', so there may be no difference' if is_open else ''})."


def _no_interval_reason(group: GroupResult, reference: GroupResult, num: int, num_reference: int, which: str) -> str:
    """Return why there is no interval; `which` describes the runs that count, of `num` and `num_reference`."""
    single = [each for each, runs in ((group, num), (reference, num_reference)) if runs == 1]
    whose = single[0].name if len(single) == 1 else "each"
    return f"no interval: there is one run of {whose}{which if any(len(each.runs) > 1 for each in single) else ''}"


def _invert_ratio(ratio: Interval) -> Interval:
    low, high = (None if not bound else 1 / bound for bound in (ratio.high, ratio.low))
    return Interval(value=1 / ratio.value, low=low, high=high, n=ratio.n)


def _capitalize_name(text: str) -> str:
    # Folder names stay as they are.
    return text[0].upper() + text[1:] if text.startswith(("batch ", "with ", "without ")) else text
