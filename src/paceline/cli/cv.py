"""`paceline cv`: cross-validate a recipe, all folds in turn or as the tasks of a job array."""

import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from paceline.cli.args import split_recipe_args
from paceline.cli.experiment import (
    Session,
    ShortRuns,
    load_for_ranks,
    raise_failed,
    refuse_launcher,
    run_experiment,
    run_task,
)
from paceline.cli.options import CvOptions
from paceline.cli.ranks import refuse_too_many
from paceline.core.errors import RecipeError
from paceline.core.experiments.experiment_dir import ExperimentDir
from paceline.core.experiments.results import CrossValidationResult
from paceline.core.metric import format_metric, metric_label
from paceline.core.run_dir import RunDir, write_atomic
from paceline.core.units import count, duration
from paceline.data.files import expand_path
from paceline.lab.cross_validation import (
    MAX_CONFUSION_CLASSES,
    FoldTrial,
    build_fold_run,
    check_folds,
    compute_accuracy,
    compute_interval,
    describe_result,
    describe_selection,
    plan_folds,
    pool_predictions,
    predict_fold,
)
from paceline.lab.learn import read_value
from paceline.lab.repeat import ArrayTask, find_task, list_study_tasks
from paceline.lab.runner import TrialRunner, describe_inconsistent_runs
from paceline.lab.trial import TrialOutcome, apply_patch
from paceline.recipe.load import Patch
from paceline.recipe.plan import divide_batch
from paceline.recipe.schema.data import Data
from paceline.recipe.schema.split import Split

_OPTIONS = {"data.split.fold": "--only", "data.split.repeat": "--repeats"}
"""Fields that each run sets, and the options that replace them."""


@dataclass(frozen=True)
class _CrossValidation:
    """The `planned` runs of a recipe with `split`. `division` is a digest of the folds of groups, else ""."""

    options: CvOptions
    runs: ShortRuns
    split: Split
    planned: tuple[FoldTrial, ...]
    division: str

    @property
    def num_folds(self) -> int:
        """Number of folds."""
        return len(self.planned) // self.options.repeats

    @property
    def chosen(self) -> list[FoldTrial]:
        """Runs of the folds that --only names, or all. Raise `RecipeError` for a fold that there is not."""
        only = _parse_only(self.options, self.num_folds)
        return [each for each in self.planned if only is None or each.fold in only]

    def build_runner(self, session: Session) -> TrialRunner:
        """Write the recipes, and return the runner: it resumes a fold that was killed."""
        return replace(self.runs.build_runner(session, is_timed=False), resumes=True)


def cv(options: CvOptions) -> int:
    """Run `paceline cv`, and return the exit code."""
    study = _plan(options)
    refuse_launcher("cv")
    refuse_too_many(study.runs.ranks, study.runs.recipe.parallel.device, oversubscribe=options.oversubscribe)
    key = {
        "verb": "cv",
        "recipe": study.runs.recipe.to_dict(),
        "runs": len(study.planned),
        "repeats": options.repeats,
        "ranks": study.runs.ranks,
        "division": study.division,
    }
    name, chosen = f"cv-{study.runs.loaded.name}", study.chosen
    if options.task is not None:
        task = find_task(_list_tasks(study), options.task)
        planned = study.planned[task.index]
        if planned not in chosen:
            raise RecipeError(f"--only: {options.only} leaves out task {task.number}, fold {planned.fold} (add it)")
        return run_task(key, options, task, lambda session: [_run_fold(study, planned, session)])
    return run_experiment(name, key, options, partial(_run, study, chosen), total=len(chosen), length="full")


def list_cv_tasks(options: CvOptions) -> tuple[ArrayTask, ...]:
    """Return the tasks of a cross-validation, one per run of the folds that --only names, or of all.

    Raise `PacelineError` for arguments that do not fit.
    """
    study = _plan(options)
    chosen = study.chosen
    return tuple(task for task in _list_tasks(study) if study.planned[task.index] in chosen)


def _list_tasks(study: _CrossValidation) -> tuple[ArrayTask, ...]:
    return list_study_tasks([each.trial for each in study.planned], 1)


def _plan(options: CvOptions) -> _CrossValidation:
    name, overrides = split_recipe_args(options.args)
    for path, value in overrides.assignments:
        if path in _OPTIONS:
            raise RecipeError(f"{path}: {value} has no effect on cv, which runs them all (use {_OPTIONS[path]})")
    if options.fold_per_group and options.folds is not None:
        raise RecipeError(f"--folds: {options.folds} has no effect with --leave-one-group-out (leave one of them out)")
    # Fold 0 exists for any number of folds, and turns `data.split` on.
    settings = (*_list_settings(options), ("data.split.fold", 0), ("log.predictions", "on"))
    loaded, ranks = load_for_ranks(name, Patch((*overrides.assignments, *settings)), options)
    recipe, split = loaded.recipe, loaded.recipe.data.split
    assert split != "off", "it has been set"
    divide_batch(recipe, ranks)
    for field in ("train.eval_every", "checkpoint.every"):
        section, _, leaf = field.partition(".")
        if getattr(getattr(recipe, section), leaf) == "off":
            raise RecipeError(f"{field}: off leaves no weights to evaluate (set {field}=1ep)")
    if split.folds == "groups" and options.repeats > 1:
        raise RecipeError(f"--repeats: {options.repeats} has no effect on groups, which divide in one way (set 1)")
    # The folder's recipe trains the final model, on all images.
    without = Patch((("data.split", "off"), ("log.predictions", "off")))
    whole = replace(loaded, recipe=apply_patch(recipe, without))
    runs = ShortRuns(whole, recipe, ranks, 0, options.repeats, options.oversubscribe)
    # Groups are read before the first run: their column may be missing.
    num_folds, division = (split.folds, "") if split.groups == "off" else _divide_groups(recipe.data)
    assert num_folds != "groups", "groups are named"
    return _CrossValidation(options, runs, split, plan_folds(recipe, num_folds, options.repeats, ranks), division)


def _list_settings(options: CvOptions) -> list[tuple[str, Any]]:
    folds = "groups" if options.fold_per_group else options.folds
    file = None if options.groups_file is None else str(expand_path(str(options.groups_file)).absolute())
    values = {"folds": folds, "groups": options.groups, "groups_file": file}
    return [(f"data.split.{name}", value) for name, value in values.items() if value is not None]


def _divide_groups(data: Data) -> tuple[int, str]:
    """Return the number of folds, and a digest of the fold of each image."""
    from paceline.data.sources.build import build_datasets
    from paceline.data.sources.folds import divide_images

    assert data.split != "off", "it has been set"
    datasets = build_datasets(data.source, may_download=True, skip_bad=data.on_bad_image == "skip")
    folds = divide_images(datasets, data.split, data.source)
    return folds.num_folds, hashlib.sha256(folds.numbers.tobytes()).hexdigest()


def _parse_only(options: CvOptions, num_folds: int) -> set[int] | None:
    if options.only is None:
        return None
    numbers = options.only.split(",")
    wrong = next((each for each in numbers if not each.isdecimal() or int(each) >= num_folds), None)
    if wrong is not None:
        raise RecipeError(f"--only: {wrong!r} is not one of {num_folds} folds (write 0 to {num_folds - 1}, as in 0,2)")
    return {int(each) for each in numbers}


def _run(study: _CrossValidation, chosen: Sequence[FoldTrial], session: Session) -> CrossValidationResult | None:
    session.print_line(f"{count(study.num_folds, 'fold')}: {count(len(chosen), 'full run')}")
    runner = study.build_runner(session)
    known = [each for each in study.planned if each in chosen or runner.find_existing(each.trial, 1)]
    outcomes = [_run_fold(study, planned, session) for planned in known]
    if missing := [each.trial.name for each in study.planned if each not in known]:
        left = f"{len(missing)} of {count(len(study.planned), 'run')} are left, the first {missing[0]}"
        session.print_line(f"{left}: the same command without --only runs them and sums up")
        if study.options.as_json:
            print(json.dumps({"runs": [each.folder for each in outcomes], "left": missing}, indent=2))
        return None
    return _build_result(study, outcomes, session.folder)


def _run_fold(study: _CrossValidation, planned: FoldTrial, session: Session) -> TrialOutcome:
    runner = study.build_runner(session)
    # A score does not depend on the speed of a machine: a finished run counts wherever it was made.
    outcome = runner.find_existing(planned.trial, 1) or runner.run(planned.trial, 1)
    if outcome.result is None:
        raise_failed(replace(outcome, error=f"{planned.trial.name}: {outcome.error}"))
    predict_fold(study.runs.recipe, outcome, study.runs.ranks, runner.spawn)
    value, metric, _ = read_value(outcome.result)
    score = f"{metric_label(metric)} {'NaN' if value is None else format_metric(metric, value)}"
    known = "from an earlier start" if outcome.is_reused else duration(outcome.result.time.wall_s)
    session.print_line(f"{planned.trial.name}: {score} ({known})")
    return outcome


def _build_result(
    study: _CrossValidation, outcomes: Sequence[TrialOutcome], folder: ExperimentDir
) -> CrossValidationResult:
    runs = [build_fold_run(*pair) for pair in zip(study.planned, outcomes, strict=True)]
    check_folds(runs, study.options.repeats, folder.path)
    first = outcomes[0].result
    assert first is not None, "a run that failed ends the cross-validation"
    _, metric, is_minimized = read_value(first)
    groups = "" if study.split.groups == "off" else study.split.groups
    pooled = pool_predictions([(each, outcome.rundir) for each, outcome in zip(study.planned, outcomes, strict=True)])
    if pooled is not None:
        write_atomic(folder.predictions, pooled.text)
        RunDir(folder.path).write_classes(pooled.table)
    value = compute_interval(runs, metric)
    of_all = None if pooled is None else compute_accuracy(pooled, groups, study.options.repeats)
    selection = describe_selection(study.runs.recipe)
    recipe = study.runs.loaded
    return CrossValidationResult(
        recipe=recipe.name,
        recipe_hash=recipe.recipe.hash,
        ranks=study.runs.ranks,
        folds=study.num_folds,
        repeats=study.options.repeats,
        groups=groups,
        metric=metric,
        is_minimized=is_minimized,
        value=value,
        accuracy=of_all,
        runs=tuple(runs),
        classes=() if pooled is None else pooled.table.classes,
        confusion=() if pooled is None or len(pooled.table.classes) > MAX_CONFUSION_CLASSES else pooled.table.confusion,
        sentences=describe_result(runs, metric, value, of_all, groups),
        caution=" ".join(filter(None, (selection, describe_inconsistent_runs(outcomes)))),
        wall_s=sum(each.wall_s for each in runs),
        command=("paceline", *sys.argv[1:]),
        provenance=first.provenance,
    )
