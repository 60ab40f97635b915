"""What was found, in sentences: who reaches the target in what share of the time, why, and what it costs. Pure."""

from collections.abc import Iterator, Sequence
from typing import Final

from paceline.core.interval import Interval
from paceline.core.units import accuracy, count, number, seconds
from paceline.report.compare.result import GroupResult

_REACHED: Final = " that reached the target"
_JUDGED: Final = " that was evaluated"


def sentences(groups: Sequence[GroupResult], target: float | None, metric: str) -> Iterator[str]:
    """Yield sentences on each group but the first, which the others are held to."""
    reference, *others = groups
    if not others:
        runs = count(len(reference.runs), "run")
        why = "it is one run alone" if len(reference.runs) == 1 else f"{runs} differ in nothing but the seed"
        yield f"There is nothing to compare with: {why} (name a run with other settings)."
    for group in others:
        if target is not None:
            yield _reaching(group, reference, level(target))
        yield from _ending(group, reference, metric)


def level(target: float) -> str:
    """Return an accuracy to reach as people say it: `75 %`, `97.22 %`."""
    return accuracy(target).replace(".00 %", " %")


def called_metric(metric: str) -> str:
    """Return an accuracy as people call it: `top-1`."""
    return metric.replace("_", " ").replace("top", "top-")


def _reaching(group: GroupResult, reference: GroupResult, target: str) -> str:
    """Return the sentence that comparisons are made for: `A reaches 75 % in 0.14 of the time of B.`"""
    if group.best is None:
        return f"{_begin(group.name)} was not evaluated: nothing is known of when it reaches {target}."
    if not group.reached:
        return f"{_begin(group.name)} does not reach {target}: its best is {accuracy(group.best.value)}."
    if group.speedup is None:
        took = f" (after {seconds(group.to_target_s.value)})" if group.to_target_s else ""
        tells = "of which {} does not tell how long it takes" if reference.reached else "which {} does not reach"
        return f"{_begin(group.name)} reaches {target}{took}, {tells.format(reference.name)}."
    fraction = _inverse(group.speedup)
    times = "of" if fraction.value < 1 else "times"
    said = f"{_begin(group.name)} reaches {target} in {number(fraction.value)} {times} the time of {reference.name}"
    ours, theirs = (sum(run.to_target_s is not None for run in each.runs) for each in (group, reference))
    sure = _sure(fraction) or f" ({_single(group, reference, ours, theirs, _REACHED)})"
    return f"{said}{sure}: {_split(group)}"


def _split(group: GroupResult) -> str:
    """Return what a speed-up is made of; hardware is named as the cause where it is another one alone."""
    assert group.speedup is not None and group.hardware is not None and group.statistical is not None
    hardware, statistical = f"{group.hardware.value:.2f}x", f"{group.statistical.value:.2f}x"
    made = {
        "hardware": f"{hardware} by hardware (images/s) times {statistical} by statistics (images needed)",
        "mixed": f"{hardware} by images/s (other hardware and other settings) times {statistical} by images needed",
        "starved": f"{hardware} by images/s, which are no property of the runs as others held the cores (CPU-starved), "
        f"times {statistical} by images needed",
        "noise": f"{hardware} by images/s, which is noise as no setting that differs changes them, times "
        f"{statistical} by images needed",
        "scatter": f"{hardware} by images/s, which is within noise, times {statistical} by images needed",
    }.get(pace_by(group), f"{hardware} by images/s times {statistical} by images needed")
    return f"{group.speedup.value:.2f}x as fast, {made}."


def pace_by(group: GroupResult) -> str:
    """Return what a group's ratio of images/s is from, "" where there is nothing to explain: it is shown as one."""
    is_shown = group.hardware is not None and f"{group.hardware.value:.2f}" != "1.00"
    return group.pace_by if group.pace_by is not None and (is_shown or group.pace_by in ("hardware", "starved")) else ""


def _sure(fraction: Interval) -> str:
    """Return how sure a share of time is, in brackets; "" where single runs do not tell."""
    if fraction.low is None or fraction.high is None:
        return ""
    bounds = f"{number(fraction.low)} to {number(fraction.high)}"
    is_open = not (fraction.is_below(1) or fraction.is_above(1))
    return f" ({bounds}{', so it may as well be the same time' if is_open else ''})"


def _ending(group: GroupResult, reference: GroupResult, metric: str) -> Iterator[str]:
    """Yield how accuracies at the end compare."""
    if group.gap is None or group.accuracy is None:
        return
    gap, what = group.gap, called_metric(metric)
    where = "above" if gap.value >= 0 else "below"
    said = (
        f"{_begin(group.name)} ends at {accuracy(group.accuracy.value)} {what}, "
        f"{100 * abs(gap.value):.2f} points {where} {reference.name}"
    )
    if gap.low is None or gap.high is None:
        ours, theirs = (sum(run.accuracy is not None for run in each.runs) for each in (group, reference))
        yield f"{said} ({_single(group, reference, ours, theirs, _JUDGED)})."
        return
    bounds = f"{100 * gap.low:+.2f} to {100 * gap.high:+.2f}"
    is_open = not (gap.is_below(0) or gap.is_above(0))
    yield f"{said} ({bounds}{', so it may as well be none' if is_open else ''})."


def _single(group: GroupResult, reference: GroupResult, num: int, num_reference: int, which: str) -> str:
    """Return why there is no interval, of groups of so many runs that count; `which` are these, of groups of more."""
    single = [each for each, runs in ((group, num), (reference, num_reference)) if runs == 1]
    of = single[0].name if len(single) == 1 else "each"
    return f"no interval: there is one run of {of}{which if any(len(each.runs) > 1 for each in single) else ''}"


def _inverse(ratio: Interval) -> Interval:
    low, high = (None if not bound else 1 / bound for bound in (ratio.high, ratio.low))
    return Interval(value=1 / ratio.value, low=low, high=high, n=ratio.n)


def _begin(text: str) -> str:
    """Return a name as a sentence begins; one that is no word, such as a folder's, stays as it is."""
    return text[0].upper() + text[1:] if text.startswith(("batch ", "with ", "without ")) else text
