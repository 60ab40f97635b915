"""Derive caveats of a comparison: unfinished or unevaluated runs, and different data, models or code. Pure."""

from collections.abc import Iterator, Sequence

from paceline.core.units import accuracy, count, join_few
from paceline.report.compare.code import describe_mixed_code, describe_other_code
from paceline.report.compare.read import ComparedRun
from paceline.report.compare.settings import find_differing_settings, format_setting
from paceline.report.compare.target import (
    MIN_BEST_SHARE,
    AccuracyTarget,
    best_accuracy,
    chance_accuracy,
    near_chance_accuracy,
    stop_accuracy,
    stop_patience,
)

_DATA_COUNTS = ("train_images", "val_images", "num_classes")
_SOURCE_PREFIX = "data.source."
_MODEL_SETTINGS = ("model.name", "model.width", "model.norm", "model.args")


def build_notes(
    groups: Sequence[Sequence[ComparedRun]], names: Sequence[str], target: AccuracyTarget, metric: str = "top1"
) -> Iterator[str]:
    """Yield notes, the most important first."""
    if target.untrained_runs:
        yield _untrained_note(target, [run for each in groups for run in each], metric)
    yield from _patience_notes(target, [run for each in groups for run in each])
    yield from _data_notes(groups, names)
    yield from _model_notes(groups, names)
    yield from _code_notes(groups, names)
    yield from _starved_notes([run for each in groups for run in each])
    for name, runs in zip(names, groups, strict=True):
        yield from _group_notes(name, runs, target)
    runs = [run for each in groups for run in each]
    stopped = [run for run in runs if run.status == "target_reached"]
    if stopped:
        yield (
            f"{len(stopped)} of {count(len(runs), 'run')} stopped at a target: their last accuracy may be below "
            "what longer training would reach."
        )
    for run in runs:
        yield from (f"{run.name}: {problem}" for problem in run.problems)


def _untrained_note(target: AccuracyTarget, runs: Sequence[ComparedRun], metric: str) -> str:
    chances = sorted({(near_chance_accuracy(run, metric), chance_accuracy(run, metric)) for run in runs} - {(0.0, 0.0)})
    near = "near chance" + "".join(
        f" ({_format_percent(level)}, where guessing gives {_format_percent(g)})" for level, g in chances
    )
    if target.level is None:
        return f"No run has learned, as no best accuracy is above {near}: there is no target to compare (set --target)."
    names = join_few([f"{run.name} (at best {accuracy(best_accuracy(run) or 0.0)})" for run in target.untrained_runs])
    half = f"half of the best run's ({accuracy(MIN_BEST_SHARE * max(best_accuracy(run) or 0.0 for run in runs))})"
    rule = f"its best is below {half}, or not above {near}" if chances else f"its best is below {half}"
    return f"The target ignores {names}: a run counts as not having learned if {rule}."


def _patience_notes(target: AccuracyTarget, runs: Sequence[ComparedRun]) -> Iterator[str]:
    if target.origin != "recipes":
        return
    others = [
        f"{run.name} ({'none' if stop_accuracy(run) is None else stop_patience(run)})"
        for run in runs
        if stop_patience(run) != target.patience
    ]
    if others:
        yield (
            f"A run reaches the target with {count(target.patience, 'evaluation')} in a row, the lowest "
            f"train.stop.patience of the recipes that stop at a target. Recipes differ in it: {join_few(others)}."
        )


def _starved_notes(runs: Sequence[ComparedRun]) -> Iterator[str]:
    starved = [f"{run.name} ({100 * run.starved_share:.0f} %)" for run in runs if run.starved_share is not None]
    if starved:
        yield (
            f"CPU-starved: {join_few(starved)}. Other processes held the cores for that share of the time that training "
            "could have run. Do not attribute images/s and times of these runs to their settings."
        )


def _format_percent(value: float) -> str:
    return f"{100 * value:.3g} %"


def _data_notes(groups: Sequence[Sequence[ComparedRun]], names: Sequence[str]) -> Iterator[str]:
    # By image and class counts, or else by source.
    for name, (first, *_) in list(zip(names, groups, strict=True))[1:]:
        reference = groups[0][0]
        others = [
            f"{first.plan[key]:,} {key.replace('_', ' ').replace('num ', '')} against {reference.plan[key]:,}"
            for key in _DATA_COUNTS
            if isinstance(first.plan.get(key), int)
            and isinstance(reference.plan.get(key), int)
            and first.plan[key] != reference.plan[key]
        ]
        if others:
            yield (
                f"{name} uses other data than {names[0]} ({', '.join(others)}): their accuracies, epochs and times to "
                "a target are not comparable."
            )
            continue
        sources = [
            each
            for each in find_differing_settings([first.settings, reference.settings])
            if each.startswith(_SOURCE_PREFIX)
        ]
        if sources and first.settings and reference.settings:
            settings_text = ", ".join(f"{each}={format_setting(first.settings.get(each))}" for each in sources)
            yield (
                f"{name} reads its data from another source than {names[0]} ({settings_text}); "
                "paceline assumes the same images."
            )


def _model_notes(groups: Sequence[Sequence[ComparedRun]], names: Sequence[str]) -> Iterator[str]:
    reference = groups[0][0]
    for name, (first, *_) in list(zip(names, groups, strict=True))[1:]:
        paths = [
            each
            for each in find_differing_settings([first.settings, reference.settings])
            if each.startswith(_MODEL_SETTINGS)
        ]
        if paths and first.settings and reference.settings:
            others = [
                f"{each} {format_setting(first.settings.get(each))} against {format_setting(reference.settings.get(each))}"
                for each in paths
            ]
            yield f"{name} trains another model than {names[0]} ({join_few(others)}): images/s are not comparable."


def _code_notes(groups: Sequence[Sequence[ComparedRun]], names: Sequence[str]) -> Iterator[str]:
    # Within a group, and against the first group.
    for name, runs in zip(names, groups, strict=True):
        if plugins := describe_mixed_code([(run.name, run.code) for run in runs]):
            yield f"{name}: its runs differ in code, not only in the seed: {plugins}."
    reference = [run.code for run in groups[0]]
    for name, runs in list(zip(names, groups, strict=True))[1:]:
        if plugins := describe_other_code([run.code for run in runs], reference):
            yield f"{name} uses other code than {names[0]}, which may explain differences: {plugins}."


def _group_notes(name: str, runs: Sequence[ComparedRun], target: AccuracyTarget) -> Iterator[str]:
    unfinished = [run.name for run in runs if run.status == "unfinished"]
    if unfinished:
        yield f"{name}: {_names_and_verb(unfinished)} not finished: paceline compares the logs so far, and no GPU-hours."
    cut = [run.name for run in runs if run.status in ("preempted", "failed")]
    if cut:
        yield f"{name}: {_names_and_verb(cut)} preempted or failed: paceline compares the training until then."
    silent = [run.name for run in runs if not run.evals]
    if silent:
        yield f"{name}: {_names_and_verb(silent)} never evaluated (train.eval_every is off, or it ended before that)."
    num_reached = sum(target.find_first_reached(run) is not None for run in runs)
    if 0 < num_reached < len(runs):
        yield f"{name}: {num_reached} of {len(runs)} runs reach the target; its times are means over these alone."
    seeds = [run.seed for run in runs if run.seed is not None]
    if len(set(seeds)) < len(seeds):
        yield f"{name}: some runs share a seed, so they vary less than usual: intervals are too narrow."


def _names_and_verb(names: Sequence[str]) -> str:
    return f"{join_few(names)} {'was' if len(names) == 1 else 'were'}"
