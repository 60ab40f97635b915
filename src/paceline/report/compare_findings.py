"""Derive the findings of a comparison: target accuracy, cause of a speed-up, sentences and notes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from paceline.core.errors import RecipeError
from paceline.core.metric import metric_label, top_k
from paceline.core.setting_effects import changes_result_only
from paceline.core.statistics import Interval, TargetCriterion
from paceline.core.units import accuracy, count, join_few, number, seconds
from paceline.report.compare_model import ComparedRun, EvalPoint, GroupResult, SpeedCause, TargetOrigin
from paceline.report.settings import find_differing_settings, format_setting

_REACHED_SUFFIX: Final = " that reached the target"
_EVALUATED_SUFFIX: Final = " that was evaluated"
# Margin of near-chance accuracy, as a share of chance or of 1 - chance if that is less. The accuracy of a model that
# predicts one class varies within it.
_NEAR_CHANCE_SHARE: Final = 0.2
# A run whose best accuracy is below this share of the overall best sets no target for the others.
MIN_BEST_SHARE: Final = 0.5
_DATA_COUNTS = ("train_images", "val_images", "num_classes")
_SOURCE_PREFIX = "data.source."
_MODEL_SETTINGS = ("model.name", "model.width", "model.norm", "model.args")
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


def build_sentences(groups: Sequence[GroupResult], target: float | None, metric: str) -> Iterator[str]:
    """Yield sentences that compare each group with the first."""
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
    finding = f"{_capitalize_name(group.name)} reaches {target}"
    finding += f" in {number(fraction.value)} {times} the time of {reference.name}"
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
    """Return the cause of the ratio of images/s; "" if it displays as 1.00x."""
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
    gap, metric_name = group.gap, metric_label(metric)
    points = f"{100 * abs(gap.value):.2f}"
    distance = f"{points} points {'above' if gap.value > 0 else 'below'}" if float(points) else "the same as"
    finding = (
        f"{_capitalize_name(group.name)} ends at {accuracy(group.accuracy.value)} {metric_name}, "
        f"{distance} {reference.name}"
    )
    if gap.low is None or gap.high is None:
        ours, theirs = (sum(run.accuracy is not None for run in each.runs) for each in (group, reference))
        yield f"{finding} ({_no_interval_reason(group, reference, ours, theirs, _EVALUATED_SUFFIX)})."
        return
    bounds = f"{100 * gap.low:+.2f} to {100 * gap.high:+.2f}"
    is_open = not (gap.is_below(0) or gap.is_above(0))
    yield f"{finding} ({bounds}{', so there may be no difference' if is_open else ''})."


def _no_interval_reason(group: GroupResult, reference: GroupResult, num: int, num_reference: int, which: str) -> str:
    """Return why there is no interval; of `num` and `num_reference` runs, `which` says which count."""
    single = [each for each, runs in ((group, num), (reference, num_reference)) if runs == 1]
    whose = single[0].name if len(single) == 1 else "each"
    return f"no interval: there is one run of {whose}{which if any(len(each.runs) > 1 for each in single) else ''}"


def _invert_ratio(ratio: Interval) -> Interval:
    low, high = (None if not bound else 1 / bound for bound in (ratio.high, ratio.low))
    return Interval(value=1 / ratio.value, low=low, high=high, n=ratio.n)


def _capitalize_name(text: str) -> str:
    # Folder names stay as they are.
    return text[0].upper() + text[1:] if text.startswith(("batch ", "with ", "without ")) else text


@dataclass(frozen=True)
class AccuracyTarget:
    """A target accuracy and its origin; None if no run was evaluated or has learned.

    `untrained_runs` have not learned and are ignored. All runs must reach the target in `patience` evaluations in a
    row.
    """

    level: float | None
    origin: TargetOrigin
    untrained_runs: tuple[ComparedRun, ...] = ()
    patience: int = 1

    def find_first_reached(self, run: ComparedRun) -> EvalPoint | None:
        """Return the evaluation with which a run reached the target, or None."""
        if self.level is None:
            return None
        index = TargetCriterion(self.level, self.patience).first_reached_at(each.accuracy for each in run.evals)
        return None if index is None else run.evals[index]


def choose_target(runs: Sequence[ComparedRun], metric: str, requested: float | None) -> AccuracyTarget:
    """Return `requested`, else the lowest `train.stop.top1`, else the highest target that all runs that learned reach.

    Raise `RecipeError` if `requested` is not in (0, 1].
    """
    if requested is not None:
        if not 0 < requested <= 1:
            raise RecipeError(f"--target: {requested:g} is not an accuracy (write a number from 0 to 1, such as 0.75)")
        return AccuracyTarget(requested, "asked")
    if metric == "top1":
        stops = [(stop, run) for run in runs if (stop := stop_accuracy(run)) is not None]
        if stops:
            # The lowest patience: a run stops at its own level, so every run that reached that has reached this one.
            patience = min(stop_patience(run) for _, run in stops)
            return AccuracyTarget(min(stop for stop, _ in stops), "recipes", patience=patience)
    bests = [(run, best) for run in runs if (best := best_accuracy(run)) is not None]
    if not bests:
        return AccuracyTarget(None, "nothing")
    # Runs near chance, or far below the best, would set a target that measures nothing.
    least = MIN_BEST_SHARE * max(best for _, best in bests)
    has_learned = [best >= least and best > near_chance_accuracy(run, metric) for run, best in bests]
    levels = [best for (_, best), learned in zip(bests, has_learned, strict=True) if learned]
    untrained = tuple(run for (run, _), learned in zip(bests, has_learned, strict=True) if not learned)
    if not levels:
        return AccuracyTarget(None, "chance", untrained)
    # The highest target that all of these runs reach.
    return AccuracyTarget(min(levels), "lowest_learnt" if untrained else "lowest_best", untrained)


def near_chance_accuracy(run: ComparedRun, metric: str) -> float:
    """Return the accuracy up to which a run has learned nothing; 0 if the number of classes is unknown."""
    chance = chance_accuracy(run, metric)
    # For ten classes 12 %: a fifth above chance.
    return chance + _NEAR_CHANCE_SHARE * min(chance, 1 - chance)


def chance_accuracy(run: ComparedRun, metric: str) -> float:
    """Return the accuracy of guessing; 0 if the number of classes is unknown."""
    classes = run.plan.get("num_classes")
    if not isinstance(classes, int) or classes < 1:
        return 0.0
    return 0.5 if metric.endswith("auroc") else min(1.0, (top_k(metric) or 1) / classes)


def best_accuracy(run: ComparedRun) -> float | None:
    """Return the highest accuracy, None without evaluations."""
    return max((each.accuracy for each in run.evals), default=None)


def stop_accuracy(run: ComparedRun) -> float | None:
    """Return `train.stop.top1` of the recipe, None if it is off."""
    try:
        stop = float(run.settings.get("train.stop.top1", ""))
    except ValueError:
        return None
    return stop if 0 < stop <= 1 else None


def stop_patience(run: ComparedRun) -> int:
    """Return `train.stop.patience` of the recipe, 1 if absent or invalid."""
    patience = run.settings.get("train.stop.patience", "")
    return max(1, int(patience)) if patience.isdecimal() and len(patience) < 10 else 1


def build_notes(
    groups: Sequence[Sequence[ComparedRun]], names: Sequence[str], target: AccuracyTarget, metric: str = "top1"
) -> Iterator[str]:
    """Yield notes, the most important first."""
    runs = [run for members in groups for run in members]
    if target.untrained_runs:
        yield _untrained_note(target, runs, metric)
    yield from _patience_notes(target, runs)
    yield from _data_notes(groups, names)
    yield from _starved_notes(runs)
    for name, members in zip(names, groups, strict=True):
        yield from _group_notes(name, members, target, metric)
    stopped = [run.status for run in runs if run.status in ("target_reached", "patience_reached", "time_reached")]
    if stopped:
        how = "at a target" if set(stopped) == {"target_reached"} else "early"
        yield (
            f"{len(stopped)} of {count(len(runs), 'run')} stopped {how}: their last accuracy may be below "
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
            f"CPU-starved: {join_few(starved)}. Other processes held the cores for that share of the time that "
            "training could have run. Do not attribute images/s and times of these runs to their settings."
        )


def _format_percent(value: float) -> str:
    return f"{100 * value:.3g} %"


def _data_notes(groups: Sequence[Sequence[ComparedRun]], names: Sequence[str]) -> Iterator[str]:
    # By image and class counts, or else by source.
    reference = groups[0][0]
    for name, (first, *_) in list(zip(names, groups, strict=True))[1:]:
        counts = [(key, first.plan.get(key), reference.plan.get(key)) for key in _DATA_COUNTS]
        others = [
            f"{ours:,} {key.replace('_', ' ').replace('num ', '')} against {theirs:,}"
            for key, ours, theirs in counts
            if isinstance(ours, int) and isinstance(theirs, int) and ours != theirs
        ]
        if others:
            yield (
                f"{name} uses other data than {names[0]} ({', '.join(others)}): their accuracies, epochs and times to "
                "a target are not comparable."
            )
        elif sources := _differing_values(first, reference, _SOURCE_PREFIX):
            values = ", ".join(f"{path}={ours}" for path, ours, _ in sources if path in first.settings)
            yield (
                f"{name} reads its data from another source than {names[0]} ({values}); "
                "paceline assumes the same images."
            )
        if models := _differing_values(first, reference, _MODEL_SETTINGS):
            values = join_few([f"{path} {ours} against {theirs}" for path, ours, theirs in models])
            yield f"{name} trains another model than {names[0]} ({values}): images/s are not comparable."


def _differing_values(
    run: ComparedRun, reference: ComparedRun, prefix: str | tuple[str, ...]
) -> list[tuple[str, str, str]]:
    """Return path and both values of the settings with `prefix` that differ."""
    if not (run.settings and reference.settings):
        return []
    paths = find_differing_settings([run.settings, reference.settings])
    ours, theirs = run.settings, reference.settings
    return [
        (path, format_setting(ours.get(path)), format_setting(theirs.get(path)))
        for path in paths
        if path.startswith(prefix)
    ]


def _group_notes(name: str, runs: Sequence[ComparedRun], target: AccuracyTarget, metric: str) -> Iterator[str]:
    unfinished = [run.name for run in runs if run.status == "unfinished"]
    if unfinished:
        text = "not finished: paceline compares the logs so far, and no GPU-hours."
        yield f"{name}: {_names_and_verb(unfinished)} {text}"
    cut = [run.name for run in runs if run.status in ("preempted", "failed")]
    if cut:
        yield f"{name}: {_names_and_verb(cut)} preempted or failed: paceline compares the training until then."
    without = [run.name for run in runs if run.columns and not run.evals]
    if without:
        yield f"{name}: {_names_and_verb(without)} evaluated without {metric_label(metric)} (train.metrics)."
    silent = [run.name for run in runs if not run.columns and not run.evals]
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


def find_speed_cause(runs: Sequence[ComparedRun], reference: Sequence[ComparedRun], ratio: Interval) -> SpeedCause:
    """Return the cause of the `ratio` of two groups' images/s, as in `GroupResult.pace_by`."""
    if any(run.starved_share is not None for run in (*runs, *reference)):
        return "starved"
    # Runs of a group have equal settings.
    paths = find_differing_settings([runs[0].settings, reference[0].settings])
    if any(_has_other_hardware(run, each) for run in runs for each in reference):
        with_hardware = (changes_result_only(path) or path.startswith(_SCALED_WITH_HARDWARE) for path in paths)
        return "hardware" if all(with_hardware) else "mixed"
    if paths and all(map(changes_result_only, paths)):
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
