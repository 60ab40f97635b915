"""`paceline scale` and `batch-study`: train a recipe on more ranks and nodes, or with other batches, and compare."""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeGuard

from paceline.cli.args import count_ranks, refuse_length, refuse_no_clock, split_recipe_args
from paceline.cli.experiment import Session, describe_outcome, raise_failed, run_experiment, run_task, with_steps_time
from paceline.cli.options import BatchStudyOptions, ScaleOptions
from paceline.cli.progress_output import OnRunStart, PrintLine
from paceline.cli.ranks import (
    allocated_nodes,
    enter_world,
    gpus_per_node,
    refuse_more_nodes,
    refuse_too_many,
    srun_starter,
)
from paceline.cli.scale_options import (
    build_grid,
    choose_target,
    parse_mode,
    read_nodes,
    read_ranks,
    refuse_recipe,
    refuse_without_effect,
)
from paceline.core.errors import PacelineError, RecipeError, WorldError
from paceline.core.experiments.experiment_dir import ExperimentDir
from paceline.core.experiments.results import ScaleResult
from paceline.core.run_dir import write_atomic
from paceline.core.units import accuracy, count
from paceline.lab.patches import build_measurement_patch
from paceline.lab.process import start_process
from paceline.lab.repeat import (
    ArrayTask,
    alternate_order,
    build_full_run_patch,
    find_task,
    list_study_tasks,
    run_interleaved,
)
from paceline.lab.runner import ReusePolicy, TrialRunner, describe_inconsistent_runs
from paceline.lab.scaling import (
    build_batch_points,
    build_scale_points,
    compare_batches,
    compute_mean_top1,
    describe_cpu_starvation,
    describe_shared_cores,
    format_points_csv,
    plan_cells,
    plan_layouts,
    plan_points,
)
from paceline.lab.trial import Trial, TrialOutcome, build_run_name, format_patch, write_recipe
from paceline.models.weights_recipe import with_weights_defaults
from paceline.parallel.environ import count_gpus
from paceline.recipe.consent import require_consent
from paceline.recipe.load import LoadedRecipe, Patch, load
from paceline.recipe.plan import resolve_batch
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.train import CrossEntropyLoss
from paceline.recipe.targets import is_multi_label

StudyOptions = ScaleOptions | BatchStudyOptions


@dataclass(frozen=True)
class _ScaleStudy:
    """Cases to run of the recipe `loaded`, and how outcomes become fields of `ScaleResult`.

    `left_out` has a line per case that is not run.
    """

    options: StudyOptions
    loaded: LoadedRecipe
    mode: str
    cases: Sequence[Trial]
    build_fields: Callable[[Sequence[TrialOutcome]], dict[str, Any]]
    left_out: Sequence[str]

    def trials_in_repeat(self, repeat: int) -> list[Trial]:
        """Return the trials of a repeat, counted from 1, in order."""
        return [case.in_turn(repeat) for case in alternate_order(self.cases, repeat)]


def scale(options: StudyOptions) -> int:
    """Measure how a recipe scales with ranks, or what batch sizes do, and return the exit code."""
    verb = "batch-study" if isinstance(options, BatchStudyOptions) else "scale"
    study = _load_study(options, starts_locally=True)
    _refuse_launcher(verb)
    require_consent(study.loaded, trust_code=options.trust_code)
    if isinstance(options, BatchStudyOptions):
        _refuse_target_without_top1(options, study.loaded.recipe)
    key = _request_key(study)
    if options.task is not None:
        task = find_task(list_study_tasks(study.cases, options.num_repeats), options.task)
        nodes = study.cases[task.index].nodes
        refuse_more_nodes([nodes] if nodes else [], os.environ)
        return run_task(key, options, task, partial(_run_case, task, study))
    refuse_more_nodes(_missing_nodes(study), os.environ)
    work, total = partial(_run_cases, study), len(study.cases) * options.num_repeats
    return run_experiment(f"{verb}-{study.loaded.name}", key, options, work, total=total)


def list_scale_tasks(options: StudyOptions) -> tuple[ArrayTask, ...]:
    """Return the tasks of the study. Raise `PacelineError` for arguments it cannot measure."""
    return list_study_tasks(_load_study(options).cases, options.num_repeats)


def _load_study(options: StudyOptions, *, starts_locally: bool = False) -> _ScaleStudy:
    """Return the study. Raise `PacelineError` for options without effect and unfit recipes.

    With `starts_locally`, refuse more ranks than this machine can start.
    """
    if isinstance(options, ScaleOptions):
        refuse_without_effect(options)
    name, overrides = split_recipe_args(options.args)
    if options.trains_fully:
        refuse_no_clock(overrides, "measure")
    else:
        refuse_length(overrides, "short runs", purpose="measure")
    loaded = with_weights_defaults(load(name, overrides))
    refuse_recipe(loaded.recipe, options)
    if starts_locally and options.nodes is None and options.ranks != "auto":
        most = max(read_ranks(options.ranks, 0))
        refuse_too_many(most, loaded.recipe.parallel.device, oversubscribe=options.oversubscribe)
    if isinstance(options, BatchStudyOptions):
        return _build_batch_study(options, loaded, overrides)
    return _build_rank_study(options, loaded, overrides, read_nodes(options.nodes))


def _missing_nodes(study: _ScaleStudy) -> list[int]:
    """Return the node counts of cases that still lack a run."""
    options = study.options
    over_nodes = [case for case in study.cases if case.nodes]
    if options.run_dir is None or not over_nodes:
        return sorted({case.nodes for case in over_nodes})
    folder = ExperimentDir(options.run_dir.expanduser())
    if folder.result.exists():
        return []
    runner, repeats = _build_runner(study, folder), range(1, options.num_repeats + 1)
    missing = (
        case
        for case in over_nodes
        if any(runner.find_existing(case.in_turn(repeat), repeat) is None for repeat in repeats)
    )
    return sorted({case.nodes for case in missing})


def _run_case(task: ArrayTask, study: _ScaleStudy, session: Session) -> list[TrialOutcome]:
    write_recipe(study.loaded.recipe, session.folder.recipe)
    runner = _build_runner(study, session.folder, session.on_start, session.print_line)
    outcome = runner.run(study.cases[task.index].in_turn(task.turn), task.turn)
    session.print_line(_outcome_line(outcome, study.options))
    if outcome.result is None:
        raise_failed(outcome)
    return [outcome]


def _refuse_launcher(verb: str) -> None:
    world = enter_world()
    if world.launcher != "single":
        started = f"{count(world.world_size, 'rank')} were started by {world.launcher}"
        raise WorldError(f"{verb}: starts its own ranks, but {started} (start it once, without torchrun or srun)")


def _refuse_target_without_top1(options: BatchStudyOptions, recipe: Recipe) -> None:
    """Raise `RecipeError` for a target accuracy if images have several labels."""
    # Cross-entropy has one label per image, so the data need not be read.
    if choose_target(options, recipe.train) is None or isinstance(recipe.train.loss, CrossEntropyLoss):
        return
    from paceline.data.sources.build import build_datasets

    data = recipe.data
    datasets = build_datasets(data.source, may_download=True, skip_bad=data.on_bad_image == "skip")
    if is_multi_label(recipe.train.loss, datasets.train.info):
        given, fix = "train.stop: it", "set train.stop=off"
        if options.target is not None:
            given, fix = f"--target: {options.target:g}", "leave it out"
        raise RecipeError(f"{given} needs top-1, and images have several labels ({fix})")


def _build_rank_study(options: ScaleOptions, loaded: LoadedRecipe, overrides: Patch, nodes: list[int]) -> _ScaleStudy:
    """Return the study of the recipe with the batch size of the fewest ranks."""
    recipe, mode = loaded.recipe, parse_mode(options)
    gpus = 0 if recipe.parallel.device == "cpu" else count_gpus(os.environ)
    if nodes and recipe.parallel.device != "cpu":
        gpus = gpus_per_node(os.environ) or gpus
    layouts = plan_layouts(read_ranks(options.ranks, gpus), nodes)
    loaded = replace(loaded, recipe=resolve_batch(recipe, min(layout.ranks for layout in layouts)))
    recipe = loaded.recipe
    if options.accuracy:
        planned = plan_points(recipe, mode, layouts, build_full_run_patch(recipe, overrides), recipe.seed)
    else:
        planned = plan_points(
            recipe, mode, layouts, build_measurement_patch(recipe, options.num_steps, overrides), None
        )

    def conclude(outcomes: Sequence[TrialOutcome]) -> dict[str, Any]:
        first = next(outcome.result for outcome in outcomes if outcome.result is not None)
        caution = describe_shared_cores(recipe.parallel, layouts, first.provenance)
        points = build_scale_points(planned, outcomes)
        if not options.accuracy:
            points = tuple(with_steps_time(point, options.num_steps) for point in points)
        return {"points": points, "caution": caution}

    return _ScaleStudy(
        options=options,
        loaded=loaded,
        mode=mode,
        cases=[point.case for point in planned if point.case is not None],
        build_fields=conclude,
        left_out=[f"{point.ranks.name}: left out: {point.error}" for point in planned if point.case is None],
    )


def _build_batch_study(options: BatchStudyOptions, loaded: LoadedRecipe, overrides: Patch) -> _ScaleStudy:
    """Return the study of the recipe with the batch size of its ranks."""
    target = choose_target(options, loaded.recipe.train)
    num_nodes = options.nodes or 0
    if options.ranks == "auto":
        ranks = gpus_per_node(os.environ) if num_nodes else count_ranks("auto", os.environ)
        ranks = max(1, ranks)
    else:
        ranks = count_ranks(options.ranks, os.environ)
    ranks *= max(1, num_nodes)
    loaded = replace(loaded, recipe=resolve_batch(loaded.recipe, ranks))
    recipe = loaded.recipe
    cells = plan_cells(recipe, build_grid(options), ranks, num_nodes, build_full_run_patch(recipe, overrides))

    def conclude(outcomes: Sequence[TrialOutcome]) -> dict[str, Any]:
        batches = build_batch_points(cells, outcomes, options.num_repeats, target)
        sentences = compare_batches(cells, outcomes, target)
        return {"batches": batches, "sentences": sentences, "target": target.level if target else None}

    return _ScaleStudy(
        options=options,
        loaded=loaded,
        mode="batch",
        cases=[cell.case for cell in cells if cell.case is not None],
        build_fields=conclude,
        left_out=[f"{cell.name}: left out: {cell.error}" for cell in cells if cell.case is None],
    )


def _request_key(study: _ScaleStudy) -> dict[str, Any]:
    """Return all that the runs depend on."""
    options = study.options
    cases = [
        {"name": case.name, "patch": format_patch(case.patch), "ranks": case.ranks, "nodes": case.nodes}
        for case in study.cases
    ]
    recipe = study.loaded.recipe.to_dict()
    whole: dict[str, Any] = {"accuracy": options.trains_fully, "turns": options.num_repeats}
    whole["target"] = options.target if isinstance(options, BatchStudyOptions) else None
    return {"experiment": "scale", "mode": study.mode, "recipe": recipe, "cases": cases, **whole}


def _run_cases(study: _ScaleStudy, session: Session) -> ScaleResult:
    options = study.options
    write_recipe(study.loaded.recipe, session.folder.recipe)
    total = len(study.cases) * options.num_repeats
    for line in study.left_out:
        session.print_line(line)
    length = f"runs of {options.num_steps:,} measured steps" if _is_short(options) else "full runs"
    repeats = count(options.num_repeats, "repeat")
    session.print_line(f"{count(len(study.cases), 'case')} with {repeats}: {total:,} {length}")
    outcomes: list[TrialOutcome] = []
    runner = _build_runner(study, session.folder, session.on_start, session.print_line)
    for outcome in run_interleaved(study.trials_in_repeat, options.num_repeats, runner):
        session.print_line(_outcome_line(outcome, options))
        outcomes.append(outcome)
    if all(outcome.result is None for outcome in outcomes):
        raise_failed(outcomes[0])
    result = _build_result(study, outcomes)
    _write_points(result, session.folder)
    return result


def _build_runner(
    study: _ScaleStudy,
    folder: ExperimentDir,
    on_start: OnRunStart = lambda trial, repeat: None,
    print_line: PrintLine = lambda line: None,
) -> TrialRunner:
    recipe, is_on_nodes = study.loaded.recipe, any(case.nodes for case in study.cases)
    return TrialRunner(
        recipe,
        folder.recipe,
        1,
        get_folder=lambda trial, repeat: folder.trials / build_run_name(trial, recipe, trial.ranks or 1, repeat),
        before_run=on_start,
        spawn=srun_starter(os.environ) if is_on_nodes else start_process,
        reuse_policy=ReusePolicy(folder.replaced, print_line, allocated_nodes(os.environ)),
        needs_speed=not study.options.trains_fully,
        oversubscribe=study.options.oversubscribe,
    )


def _is_short(options: StudyOptions) -> TypeGuard[ScaleOptions]:
    return isinstance(options, ScaleOptions) and not options.accuracy


def _outcome_line(outcome: TrialOutcome, options: StudyOptions) -> str:
    top1 = compute_mean_top1([outcome.result]) if options.trains_fully and outcome.result is not None else None
    accuracy_text = f", top-1 {accuracy(top1.value)}" if top1 is not None else ""
    known = " (from an earlier start)" if outcome.is_reused else ""
    return f"{describe_outcome(outcome, options.num_repeats)}{accuracy_text}{known}"


def _write_points(result: ScaleResult, folder: ExperimentDir) -> None:
    text = format_points_csv(result.points)
    if not text:
        return
    try:
        write_atomic(folder.points, text)
    except OSError as error:
        raise PacelineError(f"{folder.points}: cannot be written: {error.strerror} (free some room)") from None


def _build_result(study: _ScaleStudy, outcomes: Sequence[TrialOutcome]) -> ScaleResult:
    options, loaded, fields = study.options, study.loaded, study.build_fields(outcomes)
    first = next(outcome.result for outcome in outcomes if outcome.result is not None)
    return ScaleResult.model_validate(
        {
            "mode": study.mode,
            "recipe": loaded.name,
            "recipe_hash": loaded.recipe.hash,
            "steps": options.num_steps if _is_short(options) else 0,
            "warmup_steps": loaded.recipe.measure.warmup_steps,
            "repeats": options.num_repeats,
            "wall_s": sum(each.result.time.wall_s for each in outcomes if each.result is not None),
            "command": ("paceline", *sys.argv[1:]),
            "provenance": first.provenance,
            "epoch_images": first.epoch_images,
            **fields,
            "caution": " ".join(
                filter(
                    None,
                    (fields.get("caution"), describe_cpu_starvation(outcomes), describe_inconsistent_runs(outcomes)),
                )
            ),
        }
    )
