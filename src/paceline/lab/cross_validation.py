"""Plan the runs of a cross-validation, pool their predictions, and describe the result."""

import csv
import io
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from paceline.core.csv_cells import from_cell
from paceline.core.errors import PacelineError
from paceline.core.experiments.results import FoldRun
from paceline.core.json_file import read_json, read_limited
from paceline.core.metric import format_metric, metric_label, monitor_of
from paceline.core.results import ClassCount, ClassTable, RunResult, printable_class_name
from paceline.core.run_dir import RunDir, read_lines
from paceline.core.statistics import Interval, resampled_interval, wilson_interval
from paceline.core.units import accuracy, count
from paceline.lab.learn import read_value
from paceline.lab.process import ProcessStarter, extract_error, terminate_process
from paceline.lab.runner import TrialError
from paceline.lab.trial import Trial, TrialOutcome, build_eval_command
from paceline.recipe.load import Patch
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.base import is_plugin_name
from paceline.recipe.schema.optim import Plateau

MAX_CONFUSION_CLASSES: Final = 100
"""Limit for a confusion matrix in the result; `confusion.csv` has it for any number of classes."""


@dataclass(frozen=True)
class FoldTrial:
    """A run of a cross-validation: number of the fold and of the repeat, from 0, its seed, and its trial."""

    fold: int
    repeat: int
    seed: int
    trial: Trial


def plan_folds(recipe: Recipe, num_folds: int, repeats: int, ranks: int) -> tuple[FoldTrial, ...]:
    """Return the runs of a cross-validation, repeat by repeat, each with a seed of its own."""
    planned = []
    for number in range(num_folds * repeats):
        repeat, fold = divmod(number, num_folds)
        # The interval then allows for the scatter of initial weights and orders too.
        seed = recipe.seed + number
        name = f"repeat {repeat}, fold {fold}" if repeats > 1 else f"fold {fold}"
        patch: list[tuple[str, int]] = [("data.split.fold", fold), ("seed", seed)]
        patch += [("data.split.repeat", repeat)] if repeats > 1 else []
        planned.append(FoldTrial(fold, repeat, seed, Trial(name, Patch(tuple(patch)), ranks=ranks)))
    return tuple(planned)


def predict_fold(recipe: Recipe, outcome: TrialOutcome, ranks: int, start: ProcessStarter) -> None:
    """Write `predictions.csv` of a finished run of `recipe` by `paceline eval`, unless it exists.

    A run writes it itself, unless it was killed after its last evaluation. Runs on several labels per image have none.
    Raise `TrialError` if the evaluation fails.
    """
    run, result = outcome.rundir, outcome.result
    has_one_label = result is not None and result.eval is not None and not math.isnan(result.eval.top1)
    if not has_one_label or run.predictions.exists():
        return
    process = start(build_eval_command(recipe, run.path, run.predictions, ranks))
    try:
        stderr = process.communicate()[1] or ""
    finally:
        terminate_process(process)
    if process.returncode:
        error = extract_error(stderr, process.returncode)
        raise TrialError(f"{outcome.trial.name}: {error}", max(1, process.returncode))


def build_fold_run(planned: FoldTrial, outcome: TrialOutcome) -> FoldRun:
    """Return the score and the curve of a finished run. Raise `PacelineError` if its metric is NaN."""
    result = outcome.result
    assert result is not None and result.eval is not None, "a run that failed ends the cross-validation"
    value, metric, _ = read_value(result)
    if value is None:
        raise PacelineError(f"train.monitor: {metric} of {outcome.trial.name} is NaN (set another)")
    plan = read_json(outcome.rundir.path / "plan.json")
    return FoldRun(
        fold=planned.fold,
        repeat=planned.repeat,
        seed=planned.seed,
        train_images=int(plan["train_images"]),
        val_images=int(plan["val_images"]),
        value=value,
        curve=_read_curve(outcome.rundir, result),
        run=outcome.folder,
        wall_s=result.time.wall_s,
    )


def _read_curve(rundir: RunDir, result: RunResult) -> tuple[tuple[float, float], ...]:
    name = monitor_of(result).name
    key = name if result.ema is None else f"ema_{name}"
    rows = read_lines(rundir.evals, of_steps=True)
    return tuple((row["epoch"], row[key]) for row in rows if isinstance(row.get(key), float))


def check_folds(runs: Sequence[FoldRun], repeats: int, folder: Path) -> None:
    """Raise `PacelineError` if the runs in `folder` divided different numbers of images: the data were changed."""
    totals = sorted({each.train_images + each.val_images for each in runs})
    if totals != [sum(each.val_images for each in runs) / repeats]:
        different = f"runs divided {totals[0]:,} and {totals[-1]:,} images"
        raise PacelineError(f"{folder}: {different}, as the data were changed (name a new folder by --run-dir)")


@dataclass(frozen=True)
class PooledPredictions:
    """All predictions of a cross-validation: `table` by class, and `text`, the CSV file of all."""

    table: ClassTable
    text: str

    @property
    def num_images(self) -> int:
        """Number of predictions."""
        return sum(each.images for each in self.table.classes)

    @property
    def num_correct(self) -> int:
        """Number of correct predictions."""
        return sum(each.correct for each in self.table.classes)


def pool_predictions(runs: Sequence[tuple[FoldTrial, RunDir]]) -> PooledPredictions | None:
    """Return the predictions of all runs, None if they have none.

    Raise `PacelineError` for a file that cannot be read.
    """
    if not any(rundir.predictions.exists() for _, rundir in runs):
        return None
    names = [printable_class_name(str(name)) for name in read_json(runs[0][1].dataset)["class_names"]]
    pairs: Counter[tuple[str, str]] = Counter()
    pooled = io.StringIO(newline="")
    writer = csv.writer(pooled, lineterminator="\n")
    for number, (planned, rundir) in enumerate(runs):
        header, *rows = _read_rows(rundir.predictions)
        if not number:
            writer.writerow([*header, "fold", "repeat"])
        writer.writerows([*row, planned.fold, planned.repeat] for row in rows)
        pairs.update((from_cell(true), from_cell(predicted)) for _, true, predicted, _ in rows)
    confusion = tuple(tuple(pairs[true, predicted] for predicted in names) for true in names)
    predicted_as = [sum(column) for column in zip(*confusion, strict=True)]
    classes = tuple(
        ClassCount(name, sum(row), row[index], predicted_as[index])
        for index, (name, row) in enumerate(zip(names, confusion, strict=True))
    )
    return PooledPredictions(ClassTable(classes, confusion), pooled.getvalue())


def _read_rows(path: Path) -> list[list[str]]:
    try:
        rows = list(csv.reader(io.StringIO(read_limited(path).decode(), newline=""), strict=True))
        if {len(row) for row in rows} != {4}:
            raise ValueError("it is no table of predictions")
        return rows
    except (OSError, ValueError, csv.Error) as error:
        raise PacelineError(f"{path}: cannot be read: {error} (remove it, and give the same command again)") from None


def compute_interval(runs: Sequence[FoldRun], metric: str) -> Interval:
    """Return the mean of the scores with its interval, which for a metric from 0 to 1 stays there."""
    ratio = sum(each.val_images for each in runs) / sum(each.train_images for each in runs)
    interval = resampled_interval([each.value for each in runs], ratio)
    if metric == "loss" or is_plugin_name(metric) or interval.low is None or interval.high is None:
        return interval
    return interval.model_copy(update={"low": max(0.0, interval.low), "high": min(1.0, interval.high)})


def compute_accuracy(pooled: PooledPredictions, groups: str, repeats: int) -> Interval:
    """Return the accuracy of all predictions; Wilson's interval only if each is of an image of its own."""
    interval = wilson_interval(pooled.num_correct, pooled.num_images)
    is_independent = not groups and repeats == 1
    return interval if is_independent else Interval(value=interval.value, n=interval.n)


def describe_result(
    runs: Sequence[FoldRun], metric: str, value: Interval, pooled: Interval | None, groups: str
) -> tuple[str, ...]:
    """Return sentences on the score, on what its interval covers, and on the accuracy of all predictions."""
    train_images = round(sum(each.train_images for each in runs) / len(runs))
    folds = count(len({each.fold for each in runs}), "fold")
    sentences = [
        f"{metric_label(metric)} is {format_metric(metric, value.value)} on average over {count(len(runs), 'run')} "
        f"with {folds} ({_bounds(metric, value)}, 95 % confidence).",
        f"The interval covers the score{' for new groups' if groups else ''} of models that this recipe trains on "
        f"{train_images:,} images like these, with any seed (corrected resampled t; no interval of a cross-validation "
        "is exact, as folds share training images).",
    ]
    if pooled is not None:
        of_all = f"{accuracy(pooled.value)} of {pooled.n:,} predictions for images that a model was not trained on"
        if pooled.low is None or pooled.high is None:
            why = "images of a group are alike" if groups else "the same image is predicted several times"
            sentences.append(f"{of_all} are right; they have no interval, as {why}.")
        else:
            sentences.append(
                f"{of_all} are right ({accuracy(pooled.low)} to {accuracy(pooled.high)}: Wilson's interval, for these "
                "models on other images)."
            )
    return tuple(sentences)


def _bounds(metric: str, value: Interval) -> str:
    assert value.low is not None and value.high is not None, "there are two folds or more"
    return f"{format_metric(metric, value.low)} to {format_metric(metric, value.high)}"


def describe_selection(recipe: Recipe) -> str:
    """Return which settings let the validation images decide on the training, or ""."""
    chosen = [
        *(["train.stop"] if recipe.train.stop != "off" else []),
        *(["train.patience"] if recipe.train.patience != "off" else []),
        *(["schedule.name=plateau"] if isinstance(recipe.schedule, Plateau) else []),
    ]
    if not chosen:
        return ""
    return f"The validation images decide on the training by {', '.join(chosen)}, so the scores are optimistic."
