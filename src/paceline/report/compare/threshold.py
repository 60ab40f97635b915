"""Check a comparison against `--fail-below [METRIC=]VALUE`, for CI. Pure."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from paceline.core.errors import RecipeError, suggest_similar
from paceline.core.interval import Interval
from paceline.core.units import accuracy, number
from paceline.report.compare.result import CompareResult, GroupResult

DEFAULT_MEASURE: Final = "speedup"
_RATIO_MEASURES: Final = (DEFAULT_MEASURE, "gap", "images_per_s")


@dataclass(frozen=True)
class Threshold:
    """A measure of a group and its minimum: a ratio, an accuracy (0 to 1) or images/s."""

    measure: str
    least: float


def parse_thresholds(options: Sequence[str], metric: str) -> list[Threshold]:
    """Parse `[METRIC=]VALUE` words; `metric` is the compared accuracy. Raise `RecipeError` naming a bad word."""
    known = (*_RATIO_MEASURES, metric)
    thresholds = []
    for option in options:
        left, equals, right = option.rpartition("=")
        measure = left if equals else DEFAULT_MEASURE
        if measure not in known:
            guess = suggest_similar(measure, known)
            raise RecipeError(f"--fail-below: {measure!r} is not measured{guess} (use {', '.join(known)})")
        try:
            least = float(right)
        except ValueError:
            least = float("nan")
        if not abs(least) < 1e100:
            raise RecipeError(f"--fail-below: {option!r} has no number (write [METRIC=]VALUE, such as speedup=1.2)")
        if (measure == metric and not 0 <= least <= 1) or (measure == "gap" and not -1 <= least <= 1):
            raise RecipeError(
                f"--fail-below: {option!r} is not an accuracy (write a number from 0 to 1, such as {measure}=0.75)"
            )
        thresholds.append(Threshold(measure, least))
    return thresholds


def check_thresholds(result: CompareResult, thresholds: Sequence[Threshold]) -> list[str]:
    """Return a sentence per failure: each group but the first whose measure is below a threshold or unknown.

    Raise `RecipeError` if there is only one group, since no threshold could ever fail.
    """
    reference, *others = result.groups
    if thresholds and not others:
        raise RecipeError("--fail-below: there is nothing to compare with (name a run with other settings)")
    return [
        failure
        for each in thresholds
        for group in others
        for failure in _failures(group, each, reference.name, result.metric)
    ]


def _failures(group: GroupResult, threshold: Threshold, reference: str, metric: str) -> Iterator[str]:
    measure, least = threshold.measure, threshold.least
    value = _measured_value(group, measure)
    format_value = _value_formatter(measure, metric)
    runs = ", ".join(run.path for run in group.runs[:3]) + (" ..." if len(group.runs) > 3 else "")
    who = f"{group.name} ({runs})"
    if value is None:
        why = "it or the first group does not reach the target" if measure == DEFAULT_MEASURE else "it was not measured"
        yield f"{who}: {measure} is unknown, as {why}; the minimum is {format_value(least)}"
    elif value.value < least:
        against = {DEFAULT_MEASURE: f" of {reference}", "gap": f" against {reference}"}.get(measure, "")
        yield (
            f"{who}: {measure} is {format_value(value.value)}{against}, {format_value(least - value.value)} below the "
            f"minimum of {format_value(least)}"
        )


def _measured_value(group: GroupResult, measure: str) -> Interval | None:
    match measure:
        case "speedup":
            return group.speedup
        case "gap":
            return group.gap
        case "images_per_s":
            return group.images_per_s
        case _:
            return group.accuracy


def _value_formatter(measure: str, metric: str) -> Callable[[float], str]:
    if measure == DEFAULT_MEASURE:
        return lambda value: f"{value:.4g}x"
    if measure == "gap":
        return lambda value: f"{100 * value:.4g} points"
    return accuracy if measure == metric else number
