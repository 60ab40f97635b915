"""Compare groups of runs, and check the comparison against thresholds."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from paceline import __version__
from paceline.core.errors import RecipeError, suggest_similar
from paceline.core.statistics import Interval, difference_interval, mean_interval, ratio_interval
from paceline.core.units import accuracy, number
from paceline.report.compare_findings import (
    AccuracyTarget,
    best_accuracy,
    build_notes,
    build_sentences,
    choose_target,
    find_speed_cause,
)
from paceline.report.compare_model import ComparedRun, CompareResult, GroupResult, RunOutcome
from paceline.report.settings import find_differing_settings, format_setting, name_groups

DEFAULT_MEASURE: Final = "speedup"
_MEASURES: Final = (DEFAULT_MEASURE, "gap", "images_per_s")
# Means whose ratio is the ratio of the groups.
_GEOMETRIC_MEANS: Final = (
    "images_per_s", "to_target_s", "to_target_epochs", "to_target_images", "gpu_hours", "energy_kwh", "cost"
)  # fmt: skip


def compare_runs(
    runs: Sequence[ComparedRun], *, metric: str = "top1", target: float | None = None, command: Sequence[str] = ()
) -> CompareResult:
    """Return the comparison of at least one run. Raise `RecipeError` if `target` is not in (0, 1]."""
    chosen = choose_target(runs, metric, target)
    grouped = group_runs(runs)
    settings = [members[0].settings for members in grouped]
    paths = find_differing_settings(settings)
    names = name_groups(settings, [members[0].name for members in grouped])
    outcomes = [[_build_outcome(run, chosen) for run in members] for members in grouped]
    groups = tuple(
        GroupResult(
            name=name,
            ranks=members[0].ranks,
            runs=tuple(runs_of_group),
            settings={path: format_setting(members[0].settings[path]) for path in paths if path in members[0].settings},
            reached=sum(chosen.find_first_reached(run) is not None for run in members),
            accuracy=_mean_share(_known_values(runs_of_group, "accuracy")),
            best=_mean_share(_known_values(runs_of_group, "best")),
            loss=_mean_or_none(_known_values(runs_of_group, "loss")),
            **{key: _geometric_mean(_known_values(runs_of_group, key)) for key in _GEOMETRIC_MEANS},
            **(
                {}
                if runs_of_group is outcomes[0]
                else _compare_with_first(runs_of_group, outcomes[0], members, grouped[0])
            ),
        )
        for name, members, runs_of_group in zip(names, grouped, outcomes, strict=True)
    )
    return CompareResult(
        metric=metric,
        target=chosen.level,
        target_from=chosen.origin,
        groups=groups,
        sentences=tuple(build_sentences(groups, chosen.level, metric)),
        notes=tuple(build_notes(grouped, names, chosen, metric)),
        command=tuple(command),
        paceline=__version__,
    )


def group_runs(runs: Sequence[ComparedRun]) -> list[list[ComparedRun]]:
    """Group runs with equal settings except the seed, in order of first runs."""
    groups: dict[object, list[ComparedRun]] = {}
    for index, run in enumerate(runs):
        # Without readable settings, nobody knows which runs are equal.
        key = frozenset(run.settings.items()) if run.settings else index
        groups.setdefault(key, []).append(run)
    # Equal settings with repeated seeds are runs before and after a code change.
    return _split_by_repeat(runs) if len(groups) == 1 else list(groups.values())


def _split_by_repeat(runs: Sequence[ComparedRun]) -> list[list[ComparedRun]]:
    # The first run of each seed, then the second run of each, and so on.
    rounds: list[list[ComparedRun]] = []
    seen: Counter[int | None] = Counter()
    for run in runs:
        if seen[run.seed] == len(rounds):
            rounds.append([])
        rounds[seen[run.seed]].append(run)
        seen[run.seed] += 1
    return rounds


def _build_outcome(run: ComparedRun, target: AccuracyTarget) -> RunOutcome:
    reached = target.find_first_reached(run)
    return RunOutcome(
        path=str(run.path),
        seed=run.seed,
        status=run.status,
        accuracy=run.evals[-1].accuracy if run.evals else None,
        best=best_accuracy(run),
        loss=run.evals[-1].loss if run.evals else None,
        to_target_s=reached.trained_s if reached and reached.trained_s else None,
        to_target_epochs=reached.epoch if reached and reached.epoch else None,
        to_target_images=reached.images_seen if reached and reached.images_seen else None,
        images_per_s=_images_per_s(run),
        gpu_hours=_gpu_hours(run),
        energy_kwh=(run.result.energy.kwh or None)
        if run.result is not None and run.result.energy is not None
        else None,
        cost=run.result.cost if run.result is not None else None,
    )


def _images_per_s(run: ComparedRun) -> float | None:
    rates = run.result.throughput if run.result is not None else None
    return rates.images_per_s if rates is not None and rates.n and rates.images_per_s > 0 else None


def _gpu_hours(run: ComparedRun) -> float | None:
    # Downtime between processes holds no ranks.
    if run.result is None:
        return None
    times, goodput = run.result.time, run.result.goodput
    ran_s = goodput.wall_s - goodput.down_s if goodput is not None and goodput.wall_s else times.wall_s
    return run.result.world_size * ran_s / 3600 if ran_s > 0 else None


def _compare_with_first(
    outcomes: Sequence[RunOutcome],
    reference: Sequence[RunOutcome],
    runs: Sequence[ComparedRun],
    first: Sequence[ComparedRun],
) -> dict[str, Any]:
    """Return the fields of a `GroupResult` that compare it with the first group."""
    # Groups ran at different times, so intervals are Welch's, for ratios of the logarithms. All three ratios are of the
    # runs that have both, so that two of them give the third.
    ours, theirs = (
        [(run.to_target_s, run.to_target_images) for run in group if run.to_target_s and run.to_target_images]
        for group in (outcomes, reference)
    )
    gap = _difference_or_none(_known_values(outcomes, "accuracy"), _known_values(reference, "accuracy"))
    if not (ours and theirs):
        return {"gap": gap}
    hardware = _geometric_ratio(
        [images / time_s for time_s, images in ours], [images / time_s for time_s, images in theirs]
    )
    return {
        "gap": gap,
        "speedup": _geometric_ratio([1 / time_s for time_s, _ in ours], [1 / time_s for time_s, _ in theirs]),
        "hardware": hardware,
        "statistical": _geometric_ratio([1 / images for _, images in ours], [1 / images for _, images in theirs]),
        "pace_by": find_speed_cause(runs, first, hardware),
    }


def _known_values(runs: Iterable[RunOutcome], key: str) -> list[float]:
    return [value for run in runs if (value := getattr(run, key)) is not None]


def _mean_share(values: Sequence[float]) -> Interval | None:
    # Welch's interval may exceed the range of shares.
    if not values:
        return None
    mean = mean_interval(values)
    low, high = (None if bound is None else min(1.0, max(0.0, bound)) for bound in (mean.low, mean.high))
    return Interval(value=mean.value, low=low, high=high, n=mean.n)


def _mean_or_none(values: Sequence[float]) -> Interval | None:
    return mean_interval(values) if values else None


def _geometric_mean(values: Sequence[float]) -> Interval | None:
    # The ratio of geometric means is the ratio of groups.
    if len(values) == 1:
        return mean_interval(values)  # exact, without the rounding of exp and log
    return ratio_interval(values, [1.0] * len(values)) if values else None


def _difference_or_none(above: Sequence[float], below: Sequence[float]) -> Interval | None:
    return difference_interval(above, below) if above and below else None


def _geometric_ratio(above: Sequence[float], below: Sequence[float]) -> Interval:
    # Welch's interval of the difference of logarithms.
    difference = difference_interval([math.log(value) for value in above], [math.log(value) for value in below])
    low, high = (None if bound is None else _exp_or_inf(bound) for bound in (difference.low, difference.high))
    return Interval(value=math.exp(difference.value), low=low, high=high, n=difference.n)


def _exp_or_inf(logarithm: float) -> float:
    # Bounds for two very different runs may overflow.
    return math.exp(logarithm) if logarithm < 700 else math.inf


@dataclass(frozen=True)
class Threshold:
    """The minimum of a measure: a ratio, an accuracy (0 to 1) or images/s."""

    measure: str
    least: float


def parse_thresholds(options: Sequence[str], metric: str) -> list[Threshold]:
    """Parse `[METRIC=]VALUE` words. Raise `RecipeError` for a bad word."""
    known = (*_MEASURES, metric)
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
    """Return a sentence per group but the first whose measure is unknown or below a threshold.

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
    value: Interval | None = getattr(group, measure if measure in _MEASURES else "accuracy")
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


def _value_formatter(measure: str, metric: str) -> Callable[[float], str]:
    if measure == DEFAULT_MEASURE:
        return lambda value: f"{value:.4g}x"
    if measure == "gap":
        return lambda value: f"{100 * value:.4g} points"
    return accuracy if measure == metric else number
