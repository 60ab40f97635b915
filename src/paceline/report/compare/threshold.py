"""The level below which a comparison fails: `--fail-below [METRIC=]VALUE`, for machines that test. Pure."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from paceline.core.errors import RecipeError, near_miss
from paceline.core.interval import Interval
from paceline.core.units import accuracy, number
from paceline.report.compare.result import CompareResult, GroupResult

DEFAULT: Final = "speedup"
_RATIOS: Final = (DEFAULT, "gap", "images_per_s")


@dataclass(frozen=True)
class Threshold:
    """A measure of a group, and the least that it may be: a ratio, a share of 1, or images/s."""

    measure: str
    least: float


def parse_thresholds(words: Sequence[str], metric: str) -> list[Threshold]:
    """Read `[METRIC=]VALUE` words; `metric` is the accuracy that is judged. Raise `RecipeError` naming the word."""
    known = (*_RATIOS, metric)
    found = []
    for word in words:
        left, equals, right = word.rpartition("=")
        measure = left if equals else DEFAULT
        if measure not in known:
            guess = near_miss(measure, known)
            raise RecipeError(f"--fail-below: {measure!r} is not measured{guess} (use {', '.join(known)})")
        try:
            least = float(right)
        except ValueError:
            least = float("nan")
        if not abs(least) < 1e100:
            raise RecipeError(f"--fail-below: {word!r} has no number (write [METRIC=]VALUE, such as speedup=1.2)")
        if (measure == metric and not 0 <= least <= 1) or (measure == "gap" and not -1 <= least <= 1):
            raise RecipeError(f"--fail-below: {word!r} is no accuracy (write a share of 1, such as {measure}=0.75)")
        found.append(Threshold(measure, least))
    return found


def check(result: CompareResult, thresholds: Sequence[Threshold]) -> list[str]:
    """Return a sentence for each group but the first, and each threshold, that it falls below or cannot be held to.

    Raise `RecipeError` where there is no group but the first, as nothing would ever fail.
    """
    reference, *others = result.groups
    if thresholds and not others:
        raise RecipeError("--fail-below: there is nothing to compare with (name a run with other settings)")
    return [
        said for each in thresholds for group in others for said in _broken(group, each, reference.name, result.metric)
    ]


def _broken(group: GroupResult, threshold: Threshold, reference: str, metric: str) -> Iterator[str]:
    measure, least = threshold.measure, threshold.least
    value = _value(group, measure)
    told = _told(measure, metric)
    runs = ", ".join(run.path for run in group.runs[:3]) + (" ..." if len(group.runs) > 3 else "")
    who = f"{group.name} ({runs})"
    if value is None:
        why = "it or the first does not reach the target" if measure == DEFAULT else "it was not measured"
        yield f"{who}: {measure} is not known, as {why}; at least {told(least)} was asked for"
    elif value.value < least:
        against = {DEFAULT: f" of {reference}", "gap": f" against {reference}"}.get(measure, "")
        yield (
            f"{who}: {measure} is {told(value.value)}{against}, {told(least - value.value)} below {told(least)}, "
            "which was asked for"
        )


def _value(group: GroupResult, measure: str) -> Interval | None:
    match measure:
        case "speedup":
            return group.speedup
        case "gap":
            return group.gap
        case "images_per_s":
            return group.images_per_s
        case _:
            return group.accuracy


def _told(measure: str, metric: str) -> Callable[[float], str]:
    if measure == DEFAULT:
        return lambda value: f"{value:.4g}x"
    if measure == "gap":
        return lambda value: f"{100 * value:.4g} points"
    return accuracy if measure == metric else number
