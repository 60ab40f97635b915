"""Sweep one field of a recipe: plan a trial per value, and summarize the results. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from paceline.core.errors import RecipeError
from paceline.core.experiments.results import SweepPoint
from paceline.core.results import CPU_STARVED, RunResult, stage_seconds, starved_note, throughput_spread
from paceline.core.setting_effects import changes_result_only
from paceline.core.stages import DATA_WAIT
from paceline.core.statistics import mean_interval
from paceline.core.units import join_few, per_second
from paceline.lab.repeat import collect_runs
from paceline.lab.search_space import parse_values
from paceline.lab.trial import Trial, TrialOutcome, apply_patch, format_patch
from paceline.recipe.load import Patch, iter_settings
from paceline.recipe.plan import divide_batch, resolve_batch
from paceline.recipe.schema import Recipe

_FIXED_PREFIXES: Final = (
    "train.steps",
    "train.epochs",
    "train.eval",
    "train.stop",
    "schedule.",
    "checkpoint.",
    "measure.",
)
"""Settings that a short measured run sets itself or skips."""


@dataclass(frozen=True)
class Sweep:
    """The field `key`, and one trial per value. It measures speed only; `lab.tune` also compares losses."""

    key: str
    trials: tuple[Trial, ...]


def build_sweep(arguments: Sequence[str], recipe: Recipe, ranks: int, repeats: int) -> Sweep:
    """Return the sweep of a `KEY=V1,V2,...` argument over `recipe` on `ranks`.

    Raise `RecipeError` for more than one field, an invalid value, and a field that does not affect steps.
    """
    if len(arguments) > 1:
        fix = "vary one in each profile, or search with paceline tune"
        raise RecipeError(f"--vary: {len(arguments)} fields at once ({fix})")
    key, values = parse_values(arguments[0])
    for field in dict.fromkeys(field for value in values for field, _ in iter_settings({key: value})):
        if field.startswith(_FIXED_PREFIXES):
            raise RecipeError(f"--vary: {field} is set or skipped by a profile (vary another field)")
        if changes_result_only(field):
            raise RecipeError(f"--vary: {field} does not change how long a step takes (vary another field)")
    trials = []
    for value in values:
        patch = Patch(((key, value),))
        varied = resolve_batch(apply_patch(recipe, patch), ranks)
        divide_batch(varied, ranks)
        (word,) = format_patch(patch)
        if key == "data.rank_batch_size":  # results name the batch size over all ranks
            patch = Patch((("data.batch_size", varied.data.global_batch_size),))
        trials.append(Trial(word, patch, repeats))
    names = [trial.name for trial in trials]
    if twice := next((name for name in names if names.count(name) > 1), ""):
        raise RecipeError(f"--vary: {twice} is given twice (leave one out)")
    return Sweep(key, tuple(trials))


def build_sweep_points(trials: Sequence[Trial], outcomes: Sequence[TrialOutcome]) -> tuple[SweepPoint, ...]:
    """Return the measurements of each value, in order."""
    points = [_build_point(trial, outcomes) for trial in trials]
    best = _find_fastest(points)
    if best is None or best.images_per_s is None:
        return tuple(points)
    lowest = best.spread[0] if best.spread else best.images_per_s.value
    # Every value whose best run reaches the lowest of the fastest value is not distinguishable from it.
    fastest = [point is best or (point.spread is not None and point.spread[1] >= lowest) for point in points]
    return tuple(
        point.model_copy(update={"is_fastest": is_best}) for point, is_best in zip(points, fastest, strict=True)
    )


def summarize_sweep(points: Sequence[SweepPoint]) -> tuple[str, str]:
    """Return the fastest value, "" if nothing was measured, and a summary sentence."""
    best = _find_fastest(points)
    if best is None or best.images_per_s is None:
        return "", "Nothing could be measured."
    if starved := next((point.starved for point in points if point.starved), ""):
        return best.value, f"{starved[0].upper()}{starved[1:]}: speeds are not those of the recipe (run it again)."
    others = [point.value for point in points if point.is_fastest and point is not best]
    rivals = f"; not distinguishable from it: {join_few(others)}" if others else ""
    return best.value, f"{best.value} is the fastest, {per_second(best.images_per_s.value)} images/s{rivals}."


def _find_fastest(points: Sequence[SweepPoint]) -> SweepPoint | None:
    measured = [(point.images_per_s.value, point) for point in points if point.images_per_s is not None]
    return max(measured, key=lambda pair: pair[0])[1] if measured else None


def _build_point(trial: Trial, outcomes: Sequence[TrialOutcome]) -> SweepPoint:
    runs = collect_runs(trial.name, outcomes)
    return SweepPoint(
        value=trial.name.partition("=")[2],
        patch=tuple(format_patch(trial.patch)),
        error=runs.error,
        runs=runs.folders,
        **(_summarize_runs(list(runs.results.values())) if runs.results else {}),
    )


def _summarize_runs(results: Sequence[RunResult]) -> dict[str, Any]:
    first, rates = results[0], [result.throughput.images_per_s for result in results]
    batch_size, images_per_s = first.images_seen / first.steps, mean_interval(rates)
    names = dict.fromkeys(name for result in results for name in result.stages)
    stages = {name: median(stage_seconds(result, name) for result in results) for name in names}
    starved = starved_note(results)
    return {
        "batch_size": round(batch_size),
        "images_per_s": images_per_s,
        "spread": throughput_spread(results) if len(results) > 1 or first.throughput.n > 1 else None,
        "step_s": batch_size / images_per_s.value,
        "data_wait_s": stages.get(DATA_WAIT),
        "epoch_s": first.images_seen / first.epochs / images_per_s.value,
        "stages": stages,
        "bottleneck": CPU_STARVED if starved else first.verdict.get("bottleneck", ""),
        "starved": starved,
    }
