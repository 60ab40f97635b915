"""One setting of a recipe at several values: which runs that takes, and what they came to. Pure.

Unlike a search (`lab.tune`) a sweep keeps nothing and asks nothing of how a value trains: a larger batch is as welcome
as more workers. It says how fast each is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from paceline.core.errors import RecipeError
from paceline.core.experiments.sweep import SweepPoint
from paceline.core.interval import mean_of
from paceline.core.learning import only_learning
from paceline.core.results import CPU_STARVED, RunResult, starved_note
from paceline.core.stages import DATA_WAIT
from paceline.core.units import few
from paceline.lab.space import fields_of, read_values
from paceline.lab.trial import Outcome, Trial, vary, words_of
from paceline.lab.turns import error_of, results_of, runs_of
from paceline.recipe.patch import Patch
from paceline.recipe.plan import divide_batch, resolve_batch
from paceline.recipe.schema import Recipe

_MEASURED: Final = ("train.steps", "train.epochs", "train.eval", "train.stop", "schedule.", "checkpoint.", "measure.")
"""What a run of a few steps sets itself, or does not do."""


@dataclass(frozen=True)
class Sweep:
    """The field `key`, and a trial for each of its values."""

    key: str
    trials: tuple[Trial, ...]


def build_sweep(words: Sequence[str], recipe: Recipe, ranks: int, repeats: int) -> Sweep:
    """Return the sweep of a `KEY=V1,V2,...` word over `recipe`, which is measured on `ranks`.

    Raise `RecipeError` for more than one field, for a value that the recipe does not take or ranks cannot share, and
    for a field that no step depends on.
    """
    if len(words) > 1:
        fix = "vary one in each profile, or search with paceline tune"
        raise RecipeError(f"--vary: {len(words)} fields at once ({fix})")
    key, values = read_values(words[0])
    for field in dict.fromkeys(field for value in values for field in fields_of(key, value)):
        if field.startswith(_MEASURED):
            raise RecipeError(f"--vary: {field} is set by a profile, or does not happen in it (vary another field)")
        if only_learning(field):
            raise RecipeError(f"--vary: {field} does not change how long a step takes (vary another field)")
    trials = []
    for value in values:
        patch = Patch(((key, value),))
        varied = resolve_batch(vary(recipe, patch), ranks)
        divide_batch(varied, ranks)
        (word,) = words_of(patch)
        if key == "data.rank_batch_size":  # a run counts its batch over all ranks, and is known by that
            patch = Patch((("data.batch_size", varied.data.global_batch_size),))
        trials.append(Trial(word, patch, repeats))
    names = [trial.name for trial in trials]
    if twice := next((name for name in names if names.count(name) > 1), ""):
        raise RecipeError(f"--vary: {twice} is given twice (leave one out)")
    return Sweep(key, tuple(trials))


def to_points(trials: Sequence[Trial], outcomes: Sequence[Outcome]) -> tuple[SweepPoint, ...]:
    """Return what was measured with each value, in order."""
    points = [_point(trial, outcomes) for trial in trials]
    best = _fastest(points)
    if best is None or best.images_per_s is None:
        return tuple(points)
    lowest = best.spread[0] if best.spread else best.images_per_s.value
    fastest = [point is best or (point.spread is not None and point.spread[1] >= lowest) for point in points]
    return tuple(point.model_copy(update={"is_fastest": is_it}) for point, is_it in zip(points, fastest, strict=True))


def conclusion(points: Sequence[SweepPoint]) -> tuple[str, str]:
    """Return the value that is the fastest, "" where none was measured, and a sentence on it."""
    best = _fastest(points)
    if best is None or best.images_per_s is None:
        return "", "Nothing could be measured."
    if starved := next((point.starved for point in points if point.starved), ""):
        return best.value, f"{starved[0].upper()}{starved[1:]}: speeds are not those of the recipe (run it again)."
    others = [point.value for point in points if point.is_fastest and point is not best]
    rivals = f"; not to be told from it: {few(others)}" if others else ""
    return best.value, f"{best.value} is the fastest, {best.images_per_s.value:,.0f} images/s{rivals}."


def _fastest(points: Sequence[SweepPoint]) -> SweepPoint | None:
    measured = [(point.images_per_s.value, point) for point in points if point.images_per_s is not None]
    return max(measured, key=lambda pair: pair[0])[1] if measured else None


def _point(trial: Trial, outcomes: Sequence[Outcome]) -> SweepPoint:
    results = list(results_of(trial.name, outcomes).values())
    bare = SweepPoint(
        value=trial.name.partition("=")[2],
        patch=tuple(words_of(trial.patch)),
        error=error_of(trial.name, outcomes),
        runs=runs_of(trial.name, outcomes),
    )
    return bare.model_copy(update=_measured(results)) if results else bare


def _measured(results: Sequence[RunResult]) -> dict[str, Any]:
    """Return what runs of one value have, in the middle, by the names of `SweepPoint`."""
    first, rates = results[0], [result.throughput.images_per_s for result in results]
    batch_size, images_per_s = first.images_seen / first.steps, mean_of(rates)
    names = dict.fromkeys(name for result in results for name in result.stages)
    stages = {name: median(_stage_s(result, name) for result in results) for name in names}
    starved = starved_note(results)
    return {
        "batch_size": round(batch_size),
        "images_per_s": images_per_s,
        "spread": _spread(results, rates),
        "step_s": batch_size / images_per_s.value,
        "data_wait_s": stages.get(DATA_WAIT),
        "epoch_s": first.images_seen / first.epochs / images_per_s.value,
        "stages": stages,
        "bottleneck": CPU_STARVED if starved else first.verdict.get("bottleneck", ""),
        "starved": starved,
    }


def _spread(results: Sequence[RunResult], rates: Sequence[float]) -> tuple[float, float] | None:
    """Return the lowest and highest rate, or of one run those of its windows; None where there is one window alone."""
    if len(results) > 1:
        return min(rates), max(rates)
    return results[0].throughput.spread if results[0].throughput.n > 1 else None


def _stage_s(result: RunResult, name: str) -> float:
    """Return device seconds of a step in a stage; 0 where the run had none."""
    if name not in result.stages or result.account is None or not result.account.counted_steps:
        return 0.0
    return result.stages[name].device_s / result.account.counted_steps
