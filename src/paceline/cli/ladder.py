"""`paceline ladder`: add settings one by one, and keep each that makes training faster."""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from paceline.cli.args import count_ranks, refuse_length
from paceline.cli.experiment import (
    RUN_TIMEOUT_S,
    STOP_SIGNALS,
    finish_experiment,
    locked_experiment,
    read_finished,
    refuse_launcher,
    run_task,
    show_experiment,
    with_steps_time,
)
from paceline.cli.options import LadderOptions
from paceline.cli.progress_output import OnRunStart, PrintLine, progress_output
from paceline.cli.ranks import refuse_too_many
from paceline.cli.tables import print_rows
from paceline.core.console import progress_console
from paceline.core.errors import RecipeError
from paceline.core.experiments.experiment_dir import ExperimentDir
from paceline.core.experiments.results import LadderResult
from paceline.core.host import usable_cores
from paceline.core.run_dir import RunDir
from paceline.core.units import count
from paceline.lab.ladder import LadderHardware, LadderOutcome, LadderRunner
from paceline.lab.ladder_file import Ladder, Rung, list_ladders, load_ladder, require_consent_to_rungs
from paceline.lab.patches import REDUCED_LR_SHARE, build_measurement_patch, expand_equivalent_paths
from paceline.lab.repeat import ArrayTask, find_task, list_ladder_tasks
from paceline.lab.runner import ReusePolicy, TrialRunner, interrupt_on_signals
from paceline.lab.trial import Trial, TrialOutcome, apply_patch, build_run_name, format_patch, write_recipe
from paceline.parallel.environ import count_gpus
from paceline.recipe.consent import require_consent
from paceline.recipe.load import LoadedRecipe, Patch, load
from paceline.recipe.plan import resolve_batch
from paceline.recipe.schema import Recipe

AUTO_LADDER: Final = "auto"


@dataclass(frozen=True)
class LadderRequest:
    """Request; `recipe` is `loaded` with the settings of a measurement."""

    ladder: Ladder
    loaded: LoadedRecipe
    recipe: Recipe
    repeats: int
    steps: int
    ranks: int
    oversubscribe: bool = False

    @property
    def key_values(self) -> dict[str, Any]:
        """All that the runs depend on."""
        rungs = [rung.model_dump(mode="json") for rung in self.ladder.rungs]
        measured = {"recipe": self.recipe.to_dict(), "ranks": self.ranks, "repeats": self.repeats}
        return {
            "verb": "ladder",
            "ladder": self.ladder.name,
            "rungs": rungs,
            "then": self.ladder.is_open_ended,
            **measured,
        }


def ladder(options: LadderOptions) -> int:
    """Run `paceline ladder`, and return the exit code."""
    as_json, task = options.as_json, options.task
    if options.list_only:
        if task is not None:
            raise RecipeError(f"--task: {task} has no effect on a list (leave it out)")
        _print_list(split_ladder_args(options).ladder, as_json=as_json)
        return 0
    refuse_launcher("ladder")
    request = build_ladder_request(options)
    refuse_too_many(request.ranks, request.recipe.parallel.device, oversubscribe=options.oversubscribe)
    if task is not None:
        return _run_task(request, task, options.run_dir, as_json=as_json)
    name, key = f"ladder-{request.ladder.name}", request.key_values
    with locked_experiment(name, key, options.run_dir, as_json=as_json) as folder:
        result = read_finished(folder, LadderResult) or _run_ladder(request, folder, as_json=as_json)
    show_experiment(result, folder, as_json=as_json)
    return 0


def plan_ladder_tasks(options: LadderOptions) -> tuple[ArrayTask, ...]:
    """Return the tasks of a ladder. Raise `RecipeError` for arguments that it does not take."""
    return _request_tasks(build_ladder_request(options))


@dataclass(frozen=True)
class LadderArgs:
    """Arguments of `paceline ladder`: the names of the ladder and of its recipe, None if left out, and overrides."""

    ladder: str | None
    recipe: str | None
    overrides: Patch


def split_ladder_args(options: LadderOptions) -> LadderArgs:
    """Return the arguments. Raise `RecipeError` for two recipes; `recipe=NAME` and `--recipe` name one too."""
    names = [word for word in options.args if "=" not in word]
    named = [word.removeprefix("recipe=") for word in options.args if word.startswith("recipe=")]
    recipes = [*names[1:], *named, *([options.recipe] if options.recipe is not None else [])]
    if len(recipes) > 1:
        raise RecipeError(f"{recipes[1]!r}: a ladder varies one recipe, and {recipes[0]!r} is one (drop one of them)")
    overrides = Patch.parse([word for word in options.args if "=" in word and not word.startswith("recipe=")])
    return LadderArgs(names[0] if names else None, recipes[0] if recipes else None, overrides)


def _print_list(name: str | None, *, as_json: bool) -> None:
    if name is None:
        show_ladders([load_ladder(each) for each in list_ladders()], as_json=as_json)
    else:
        show_rungs(load_ladder(name), as_json=as_json)


def build_ladder_request(options: LadderOptions) -> LadderRequest:
    """Return the checked request. Raise `RecipeError` for arguments that do not fit."""
    args = split_ladder_args(options)
    recipe, overrides = args.recipe, args.overrides
    chosen = load_ladder(args.ladder or AUTO_LADDER)
    refuse_length(overrides, "a ladder", purpose="compare")
    for path, value in overrides.assignments:
        if path in expand_equivalent_paths(chosen.rungs[0].set):
            fix = f"leave it out, or copy the ladder and change its rung {chosen.rungs[0].name!r}"
            raise RecipeError(f"{path}: {value} has no effect on ladder {chosen.name}, which sets it ({fix})")
    loaded = load(recipe or chosen.recipe, overrides)
    require_consent(loaded, own_code=options.own_code)
    require_consent_to_rungs(chosen, args.ladder or AUTO_LADDER, own_code=options.own_code)
    base = loaded.recipe
    if chosen.warmup_steps is not None and "measure.warmup_steps" not in dict(overrides.assignments):
        base = apply_patch(base, Patch((("measure.warmup_steps", chosen.warmup_steps),)))
    steps = options.steps or chosen.steps
    measured = apply_patch(base, build_measurement_patch(base, steps, overrides, lr_share=REDUCED_LR_SHARE))
    return LadderRequest(
        ladder=chosen if recipe is None else chosen.model_copy(update={"recipe": recipe}),
        loaded=loaded,
        recipe=measured,
        repeats=options.repeats or chosen.repeats,
        steps=steps,
        ranks=count_ranks(options.ranks, os.environ),
        oversubscribe=options.oversubscribe,
    )


def _run_ladder(request: LadderRequest, folder: ExperimentDir, *, as_json: bool) -> LadderResult:
    out = progress_console(as_json=as_json)
    _write_recipes(request, folder)
    total = None if request.ladder.is_open_ended else request.repeats * (2 * len(request.ladder.rungs) - 1)
    with interrupt_on_signals(*STOP_SIGNALS), progress_output(out, total) as (on_start, print_line):
        print_line(_plan_text(request, total))
        outcome = _build_ladder_runner(request, folder, on_start, print_line).run()
    result = _build_result(request, outcome, folder)
    finish_experiment(folder, result)
    return result


def _run_task(request: LadderRequest, number: int, run_dir: Path | None, *, as_json: bool) -> int:
    """Run one repeat of one rung, in the ladder's folder."""
    task = find_task(_request_tasks(request), number)

    def run(folder: ExperimentDir, on_start: OnRunStart, print_line: PrintLine) -> Sequence[TrialOutcome]:
        _write_recipes(request, folder)
        return _build_ladder_runner(request, folder, on_start, print_line).run_task(task.index + 1, task.turn)

    return run_task(request.key_values, run_dir, task, run, as_json=as_json)


def _request_tasks(request: LadderRequest) -> tuple[ArrayTask, ...]:
    return list_ladder_tasks(request.ladder, request.repeats, request.ranks)


def _write_recipes(request: LadderRequest, folder: ExperimentDir) -> None:
    write_recipe(request.loaded.recipe, folder.recipe)
    write_recipe(request.recipe, folder.measured)


def _plan_text(request: LadderRequest, total: int | None) -> str:
    steps = count(request.recipe.measure.warmup_steps + request.steps, "step")
    runs = (
        f"up to {count(total, 'run')}" if total is not None else f"{count(request.repeats, 'pair')} of runs per rung,"
    )
    return f"ladder {request.ladder.name}: {runs} of {steps}"


def _build_ladder_runner(
    request: LadderRequest, folder: ExperimentDir, on_start: OnRunStart, print_line: PrintLine
) -> LadderRunner:
    from paceline.lab.ladder import propose_rung
    from paceline.lab.page_cache import prepare_page_cache
    from paceline.lab.prepare_data import DataForm, PreparedData, prepare_data
    from paceline.measure.timer import now_s

    hardware = LadderHardware(gpus=count_gpus(os.environ), cores=usable_cores(), ranks=request.ranks)

    def make(form: DataForm) -> PreparedData:
        waits = partial(print_line, f"{form}: waiting for another task that prepares it")
        made = prepare_data(form, request.recipe.data, folder.data, workers=hardware.cores, now=now_s, on_wait=waits)
        if not made.is_reused:
            print_line(f"{form}: prepared in {made.seconds:,.1f} s")
        return made

    def before(trial: Trial, repeat: int) -> None:
        on_start(trial, repeat)
        prepare_page_cache(
            resolve_batch(apply_patch(request.recipe, trial.patch), trial.ranks or request.ranks), is_cold=trial.is_cold
        )

    runner = TrialRunner(
        request.recipe,
        folder.measured,
        request.ranks,
        get_folder=lambda trial, repeat: (
            folder.trials / build_run_name(trial, request.recipe, trial.ranks or request.ranks, repeat)
        ),
        before_run=before,
        reuse_policy=ReusePolicy(folder.replaced, print_line),
        timeout_s=RUN_TIMEOUT_S,
        oversubscribe=request.oversubscribe,
    )
    return LadderRunner(
        ladder=request.ladder,
        recipe=request.recipe,
        runner=runner,
        hardware=hardware,
        repeats=request.repeats,
        prepare=make,
        propose=propose_rung,
        report=print_line,
    )


def _build_result(request: LadderRequest, outcome: LadderOutcome, folder: ExperimentDir) -> LadderResult:
    runs: Sequence[str] = [run for rung in outcome.rungs for run in rung.runs]
    measured_s = sum(RunDir(folder.path / run).read_result().time.wall_s for run in runs)
    first = request.ladder.rungs[0]
    lowest = resolve_batch(apply_patch(request.recipe, first.patch), first.ranks or request.ranks)
    return LadderResult(
        ladder=request.ladder.name,
        summary=request.ladder.summary,
        recipe=request.loaded.name,
        recipe_hash=request.loaded.recipe.hash,
        ranks=request.ranks,
        steps=request.steps,
        warmup_steps=request.recipe.measure.warmup_steps,
        repeats=request.repeats,
        batch_size=lowest.data.global_batch_size,
        rungs=tuple(with_steps_time(rung, request.steps) for rung in outcome.rungs),
        best=outcome.best.name,
        best_patch=tuple(format_patch(outcome.best.patch)),
        stopped=outcome.stopped,
        wall_s=measured_s + sum(rung.prepare_s for rung in outcome.rungs),
        command=("paceline", *sys.argv[1:]),
        provenance=outcome.best.results[-1].provenance,
    )


def show_ladders(ladders: Sequence[Ladder], *, as_json: bool) -> None:
    """Print the name and summary of each ladder."""
    if as_json:
        print(json.dumps({ladder.name: ladder.summary for ladder in ladders}, indent=2))
        return
    width = max(len(ladder.name) for ladder in ladders)
    for ladder in ladders:
        print(f"{ladder.name:{width}}  {ladder.summary}")


def show_rungs(ladder: Ladder, *, as_json: bool) -> None:
    """Print the rungs of a ladder."""
    if as_json:
        rungs = [rung.model_dump(mode="json") for rung in ladder.rungs]
        facts = {"ladder": ladder.name, "summary": ladder.summary, "recipe": ladder.recipe}
        print(json.dumps({**facts, "steps": ladder.steps, "repeats": ladder.repeats, "rungs": rungs}, indent=2))
        return
    rows = [(rung.name, " ".join(_rung_settings(rung)), rung.explains) for rung in ladder.rungs]
    print_rows(rows, f"{ladder.name}, over {ladder.recipe}: {ladder.summary}")


def _rung_settings(rung: Rung) -> Iterator[str]:
    yield from (f"{key}={value}" for key, value in rung.set.items())
    if rung.batch_factor is not None:
        yield f"batch x{rung.batch_factor}"
