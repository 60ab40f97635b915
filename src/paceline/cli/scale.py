"""`paceline scale`: train a recipe on more ranks and nodes, or with larger batches, and compare.

Each run is a training in processes of its own, started here, or by `srun` if nodes are requested.
"""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.cli.allocation import gpus_of_a_node, nodes_of, refuse_more_nodes, start_in
from paceline.cli.experiment import STOPS, experiment, found_before, leave, run_task
from paceline.cli.ranks import enter_world, refuse_too_many
from paceline.cli.scale_words import Options, one_of, read_nodes, read_ranks, refuse_recipe
from paceline.cli.telling import Begins, Say, telling
from paceline.cli.words import count_ranks, refuse_length, refuse_no_clock, split_words
from paceline.core.console import progress_console
from paceline.core.errors import PacelineError, WorldError
from paceline.core.experiments.folder import ExperimentDir
from paceline.core.experiments.scaling import ScalePoint, ScaleResult
from paceline.core.rundir import write_atomic
from paceline.core.units import accuracy as percent
from paceline.core.units import count
from paceline.lab.batch_study import plan_cells, sentences_of, to_batches
from paceline.lab.child import start_process
from paceline.lab.earlier import Earlier, unlike
from paceline.lab.measuring import measuring_patch
from paceline.lab.predict.points import POINTS
from paceline.lab.runner import Runner, TrialError, interrupted_by
from paceline.lab.scaling import caution_of, plan_points, points_csv, ranks_over, starving, to_points, top1_of
from paceline.lab.tasks import Task, find_task, place_of, study_tasks
from paceline.lab.trial import Outcome, Trial, folder_name, words_of, write_recipe
from paceline.lab.turns import Case, run_turns, there_and_back, whole_patch
from paceline.parallel.environ import count_gpus
from paceline.recipe.consent import require_consent
from paceline.recipe.load import Loaded, load
from paceline.recipe.patch import Patch
from paceline.recipe.plan import resolve_batch


@dataclass(frozen=True)
class _Study:
    """Cases to run, and how to turn outcomes into fields of `ScaleResult`. `lost` explains cases left out, one line
    each.
    """

    mode: str
    cases: Sequence[Case]
    conclude: Callable[[Sequence[Outcome]], dict[str, Any]]
    is_whole: bool
    lost: Sequence[str]
    oversubscribe: bool = False

    def of_turn(self, repeat: int) -> list[Trial]:
        """Return the trials of a repeat, counted from 1, in order."""
        return [case.trial(repeat) for case in there_and_back(self.cases, repeat)]


def scale(
    args: list[str],
    *,
    ranks: str,
    nodes: str | None,
    mode: str | None,
    steps: int | None,
    repeats: int | None,
    accuracy: bool,
    batch_sizes: str | None,
    warmups: str | None,
    lr_rules: str | None,
    target: float | None,
    seeds: int | None,
    run_dir: Path | None,
    as_json: bool,
    task: int | None = None,
    own_code: bool = False,
    oversubscribe: bool = False,
) -> int:
    """Run `paceline scale`, and return the exit code."""
    options = Options(
        ranks=ranks,
        nodes=nodes,
        mode=mode,
        steps=steps,
        repeats=repeats,
        accuracy=accuracy,
        batch_sizes=batch_sizes,
        warmups=warmups,
        lr_rules=lr_rules,
        target=target,
        seeds=seeds,
        oversubscribe=oversubscribe,
    )
    loaded, study = _read(args, options, is_here=True)
    _refuse_launcher()
    require_consent(loaded, own_code=own_code)
    if task is not None:
        return _run_task(options, loaded, study, task, run_dir, as_json=as_json)
    refuse_more_nodes(_missing_nodes(options, loaded, study, run_dir), os.environ)
    request = _asked(study, loaded, options)
    with experiment(f"scale-{loaded.name}", request, run_dir, as_json=as_json) as folder:
        result = found_before(folder, ScaleResult)
        if result is None:
            outcomes = _measure(study, loaded, options, folder, as_json=as_json)
            result = _conclude(study, loaded, options, outcomes)
            _write_points(result, folder)
            leave(folder, result)
    from paceline.cli.show_scale import show_scale

    show_scale(result, folder, as_json=as_json)
    return 0


def tasks_of(args: list[str], options: Options) -> tuple[Task, ...]:
    """Return the tasks of the study. Raise `PacelineError` for arguments it cannot measure."""
    return study_tasks(_read(args, options)[1].cases, options.turns)


def _read(args: list[str], options: Options, *, is_here: bool = False) -> tuple[Loaded, _Study]:
    """Return the loaded recipe and the study. Raise `PacelineError` for options without effect and unfit recipes.

    With `is_here`, also refuse more ranks than this machine can start.
    """
    options.refuse_without_effect()
    name, overrides = split_words(args)
    if options.is_whole:
        refuse_no_clock(overrides, "measure")
    else:
        refuse_length(overrides, "short runs", to="measure")
    loaded = load(name, overrides)
    refuse_recipe(loaded.recipe, options)
    if is_here and options.nodes is None and options.ranks != "auto":
        most = max(read_ranks(options.ranks, 0))
        refuse_too_many(most, loaded.recipe.parallel.device, oversubscribe=options.oversubscribe)
    build = _study_batches if options.is_study else _study_ranks
    loaded, study = build(options, loaded, overrides, read_nodes(options.nodes))
    return loaded, replace(study, oversubscribe=options.oversubscribe)


def _missing_nodes(options: Options, loaded: Loaded, study: _Study, run_dir: Path | None) -> list[int]:
    """Return the node counts of multi-node cases that still lack a run."""
    over_nodes = [case for case in study.cases if case.nodes]
    if run_dir is None or not over_nodes:
        return sorted({case.nodes for case in over_nodes})
    folder = ExperimentDir(run_dir.expanduser())
    if folder.result.exists():
        return []
    runner, repeats = _runner(study, loaded, folder), range(1, options.turns + 1)
    missing = (
        case for case in over_nodes if any(runner.known(case.trial(repeat), repeat) is None for repeat in repeats)
    )
    return sorted({case.nodes for case in missing})


def _run_task(
    options: Options, loaded: Loaded, study: _Study, number: int, run_dir: Path | None, *, as_json: bool
) -> int:
    """Run one repeat of one case, in the study's folder."""
    task = find_task(study_tasks(study.cases, options.turns), number)
    index, repeat = place_of(task, len(study.cases))
    case = study.cases[index]
    refuse_more_nodes([case.nodes] if case.nodes else [], os.environ)

    def run(folder: ExperimentDir, on_start: Begins, print_line: Say) -> Sequence[Outcome]:
        write_recipe(loaded.recipe, folder.recipe)
        outcome = _runner(study, loaded, folder, on_start, print_line).run(case.trial(repeat), repeat)
        print_line(_line(outcome, options.turns, is_whole=study.is_whole))
        _refuse_nothing([outcome])
        return [outcome]

    return run_task(_asked(study, loaded, options), run_dir, task, run, as_json=as_json)


def _refuse_launcher() -> None:
    """Raise `WorldError` if this process is one of several ranks, each of which would start all runs."""
    world = enter_world()
    if world.launcher != "single":
        started = f"{count(world.world_size, 'rank')} were started by {world.launcher}"
        raise WorldError(f"scale: starts its own ranks, but {started} (start it once, without torchrun or srun)")


def _study_ranks(options: Options, loaded: Loaded, overrides: Patch, nodes: list[int]) -> tuple[Loaded, _Study]:
    """Return the study of ranks, and the recipe with the batch size of the smallest rank count."""
    recipe, mode = loaded.recipe, options.scaling_mode()
    gpus = 0 if recipe.parallel.device == "cpu" else count_gpus(os.environ)
    if nodes and recipe.parallel.device != "cpu":
        gpus = gpus_of_a_node(os.environ) or gpus
    layouts = ranks_over(read_ranks(options.ranks, gpus), nodes)
    loaded = replace(loaded, recipe=resolve_batch(recipe, min(layout.ranks for layout in layouts)))
    recipe = loaded.recipe
    if options.accuracy:
        planned = plan_points(recipe, mode, layouts, whole_patch(recipe, overrides), recipe.seed)
    else:
        planned = plan_points(recipe, mode, layouts, measuring_patch(recipe, options.num_steps, overrides), None)

    def conclude(outcomes: Sequence[Outcome]) -> dict[str, Any]:
        caution = caution_of(recipe, layouts, _provenance(outcomes))
        points = to_points(planned, outcomes)
        if not options.accuracy:
            points = tuple(_of_steps(point, options.num_steps) for point in points)
        return {"points": points, "caution": caution}

    study = _Study(
        mode=mode,
        cases=[point.case for point in planned if point.case is not None],
        conclude=conclude,
        is_whole=options.accuracy,
        lost=[f"{point.ranks.name}: left out: {point.error}" for point in planned if point.case is None],
    )
    return loaded, study


def _of_steps(point: ScalePoint, num_steps: int) -> ScalePoint:
    """Return the point with the time of `num_steps` steps, if its step was timed."""
    return point if point.step_s is None else point.model_copy(update={"steps_s": num_steps * point.step_s})


def _study_batches(options: Options, loaded: Loaded, overrides: Patch, nodes: list[int]) -> tuple[Loaded, _Study]:
    """Return the study of batch sizes, and the recipe with the batch size of its ranks."""
    target = options.target_of(loaded.recipe)
    num_nodes = one_of("--nodes", nodes) if nodes else 0
    if options.ranks == "auto":
        ranks = gpus_of_a_node(os.environ) if num_nodes else count_ranks("auto", os.environ)
        ranks = max(1, ranks)
    else:
        ranks = one_of("--ranks", read_ranks(options.ranks, 0))
    ranks *= max(1, num_nodes)
    loaded = replace(loaded, recipe=resolve_batch(loaded.recipe, ranks))
    recipe = loaded.recipe
    cells = plan_cells(recipe, options.grid(), ranks, num_nodes, whole_patch(recipe, overrides))

    def conclude(outcomes: Sequence[Outcome]) -> dict[str, Any]:
        batches = to_batches(cells, outcomes, options.turns, target)
        sentences = sentences_of(cells, outcomes, target)
        return {"batches": batches, "sentences": sentences, "target": target.level if target else None}

    study = _Study(
        mode="batch",
        cases=[cell.case for cell in cells if cell.case is not None],
        conclude=conclude,
        is_whole=True,
        lost=[f"{cell.name}: left out: {cell.error}" for cell in cells if cell.case is None],
    )
    return loaded, study


def _asked(study: _Study, loaded: Loaded, options: Options) -> dict[str, Any]:
    """Return everything that the runs depend on, as plain values."""
    cases = [
        {"name": case.name, "patch": words_of(case.patch), "ranks": case.ranks, "nodes": case.nodes}
        for case in study.cases
    ]
    recipe = loaded.recipe.to_dict()
    whole = {"accuracy": study.is_whole, "turns": options.turns, "target": options.target}
    return {"experiment": "scale", "mode": study.mode, "recipe": recipe, "cases": cases, **whole}


def _measure(study: _Study, loaded: Loaded, options: Options, folder: ExperimentDir, *, as_json: bool) -> list[Outcome]:
    """Run all cases in alternating order, and return the outcomes. Raise `TrialError` if all failed."""
    out = progress_console(as_json=as_json)
    write_recipe(loaded.recipe, folder.recipe)
    total = len(study.cases) * options.turns
    outcomes: list[Outcome] = []
    with interrupted_by(*STOPS), telling(out, total) as (on_start, print_line):
        for line in study.lost:
            print_line(line)
        length = "full runs" if study.is_whole else f"runs of {options.num_steps:,} counted steps"
        print_line(f"{count(len(study.cases), 'case')} with {count(options.turns, 'repeat')}: {total:,} {length}")
        for outcome in run_turns(study.of_turn, options.turns, _runner(study, loaded, folder, on_start, print_line)):
            print_line(_line(outcome, options.turns, is_whole=study.is_whole))
            outcomes.append(outcome)
    _refuse_nothing(outcomes)
    return outcomes


def _runner(
    study: _Study,
    loaded: Loaded,
    folder: ExperimentDir,
    on_start: Begins = lambda trial, repeat: None,
    print_line: Say = lambda line: None,
) -> Runner:
    recipe, is_on_nodes = loaded.recipe, any(case.nodes for case in study.cases)
    return Runner(
        recipe,
        folder.recipe,
        1,
        place=lambda trial, repeat: folder.trials / folder_name(trial, recipe, trial.ranks or 1, repeat),
        begins=on_start,
        start=start_in(os.environ) if is_on_nodes else start_process,
        earlier=Earlier(folder.replaced, print_line, nodes_of(os.environ)),
        needs_speed=not study.is_whole,
        oversubscribe=study.oversubscribe,
    )


def _line(outcome: Outcome, num_repeats: int, *, is_whole: bool) -> str:
    name = outcome.trial.name + (f", repeat {outcome.repeat}" if num_repeats > 1 else "")
    if outcome.result is None:
        return f"{name}: failed: {outcome.error}"
    top1 = top1_of([outcome.result]) if is_whole else None
    accuracy_text = f", top-1 {percent(top1.value)}" if top1 is not None else ""
    known = " (from an earlier start)" if outcome.is_known else ""
    rate = outcome.result.throughput.images_per_s
    speed = f"{rate:,.0f} images/s" if rate > 0 else "no step was counted after measure.warmup_steps"
    return f"{name}: {speed}{accuracy_text}{known}"


def _refuse_nothing(outcomes: Sequence[Outcome]) -> None:
    """Raise the error of the first run if all runs failed."""
    if any(outcome.result is not None for outcome in outcomes):
        return
    first = outcomes[0]
    if first.code == 1:  # a bug of paceline's: print its traceback too
        print(*(line for line in first.said.splitlines() if not line.startswith("error: ")), sep="\n", file=sys.stderr)
    raise TrialError(first.error, first.code)


def _write_points(result: ScaleResult, folder: ExperimentDir) -> None:
    """Write measured points to predict from. Raise `PacelineError` if they cannot be written."""
    text = points_csv(result.points)
    if not text:
        return
    path = folder.path / POINTS
    try:
        write_atomic(path, text)
    except OSError as error:
        raise PacelineError(f"{path}: cannot be written: {error.strerror} (free some room)") from None


def _provenance(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    return next(outcome.result.provenance for outcome in outcomes if outcome.result is not None)


def _epoch_images(outcomes: Sequence[Outcome]) -> float | None:
    """Return the images per epoch of the first successful run."""
    return next(outcome.result for outcome in outcomes if outcome.result is not None).epoch_images


def _conclude(study: _Study, loaded: Loaded, options: Options, outcomes: Sequence[Outcome]) -> ScaleResult:
    fields = study.conclude(outcomes)
    return ScaleResult.model_validate(
        {
            "mode": study.mode,
            "recipe": loaded.name,
            "recipe_hash": loaded.recipe.hash,
            "steps": 0 if study.is_whole else options.num_steps,
            "warmup_steps": loaded.recipe.measure.warmup_steps,
            "repeats": options.turns,
            "wall_s": sum(each.result.time.wall_s for each in outcomes if each.result is not None),
            "command": ("paceline", *sys.argv[1:]),
            "provenance": _provenance(outcomes),
            "epoch_images": _epoch_images(outcomes),
            **fields,
            "caution": " ".join(filter(None, (fields.get("caution"), starving(outcomes), unlike(outcomes)))),
        }
    )
