"""`paceline ladder`: add settings one by one, measure each against the rung below, and keep or drop it.

A ladder's folder holds one run directory per run. The same command resumes it, and reuses the runs of its tasks.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from paceline.cli.experiment import (
    LIMIT_S,
    STOPS,
    experiment,
    found_before,
    leave,
    refuse_ranks_of_others,
    run_task,
)
from paceline.cli.ranks import refuse_too_many
from paceline.cli.show_ladder import show_ladder, show_ladders, show_rungs
from paceline.cli.telling import Begins, Say, telling
from paceline.cli.words import count_ranks, refuse_length
from paceline.core.console import progress_console
from paceline.core.errors import RecipeError
from paceline.core.experiments.folder import ExperimentDir
from paceline.core.experiments.ladder import LadderResult, RungResult
from paceline.core.limits import usable_cores
from paceline.core.rundir import RunDir
from paceline.core.units import count
from paceline.lab.earlier import Earlier
from paceline.lab.ladder import Climbed, Climber, Here
from paceline.lab.laying import settled_by
from paceline.lab.measuring import FALLING, measuring_patch
from paceline.lab.rungs import Ladder, ladder_names, load_ladder, require_consent_to_rungs
from paceline.lab.runner import Runner, interrupted_by
from paceline.lab.tasks import Task, find_task, ladder_tasks, place_of
from paceline.lab.trial import Outcome, Trial, folder_name, vary, words_of, write_recipe
from paceline.parallel.environ import count_gpus
from paceline.recipe.consent import require_consent
from paceline.recipe.load import Loaded, load
from paceline.recipe.patch import Patch
from paceline.recipe.plan import resolve_batch
from paceline.recipe.schema import Recipe

_AUTO: Final = "auto"


@dataclass(frozen=True)
class _Asked:
    """Request: `recipe` is the measured form of `loaded`."""

    ladder: Ladder
    loaded: Loaded
    recipe: Recipe
    repeats: int
    steps: int
    ranks: int
    oversubscribe: bool = False

    @property
    def plain(self) -> dict[str, Any]:
        """Everything that the runs depend on, as plain values."""
        rungs = [rung.model_dump(mode="json") for rung in self.ladder.rungs]
        measured = {"recipe": self.recipe.to_dict(), "ranks": self.ranks, "repeats": self.repeats}
        return {"verb": "ladder", "ladder": self.ladder.name, "rungs": rungs, "then": self.ladder.goes_on, **measured}


def ladder(
    args: list[str],
    ranks: str,
    run_dir: Path | None,
    *,
    recipe: str | None,
    steps: int | None,
    repeats: int | None,
    list_only: bool,
    as_json: bool,
    task: int | None = None,
    own_code: bool = False,
    oversubscribe: bool = False,
) -> int:
    """Run `paceline ladder`, and return the exit code."""
    name, recipe, overrides = _split(args, recipe)
    if list_only:
        if task is not None:
            raise RecipeError(f"--task: {task} has no effect on a list (leave it out)")
        _list(name, as_json=as_json)
        return 0
    request = _ask(load_ladder(name or _AUTO), recipe, overrides, ranks, steps=steps, repeats=repeats)
    request = replace(request, oversubscribe=oversubscribe)
    refuse_too_many(request.ranks, request.recipe.parallel.device, oversubscribe=oversubscribe)
    require_consent(request.loaded, own_code=own_code)
    require_consent_to_rungs(request.ladder, name or _AUTO, own_code=own_code)
    if task is not None:
        return _run_task(request, task, run_dir, as_json=as_json)
    with experiment(f"ladder-{request.ladder.name}", request.plain, run_dir, as_json=as_json) as folder:
        result = found_before(folder, LadderResult) or _climb(request, folder, as_json=as_json)
    show_ladder(result, folder, as_json=as_json)
    return 0


def tasks_of(
    args: list[str], ranks: str, *, recipe: str | None, steps: int | None, repeats: int | None
) -> tuple[Task, ...]:
    """Return the tasks of the ladder. Raise `RecipeError` for arguments that a ladder does not take."""
    name, recipe, overrides = _split(args, recipe)
    return _tasks(_ask(load_ladder(name or _AUTO), recipe, overrides, ranks, steps=steps, repeats=repeats))


def _split(args: list[str], recipe: str | None) -> tuple[str | None, str | None, Patch]:
    """Return the names of ladder and recipe, None if omitted, and the overrides."""
    names = [word for word in args if "=" not in word]
    overrides = [word for word in args if "=" in word and not word.startswith("recipe=")]
    named = [word.removeprefix("recipe=") for word in args if word.startswith("recipe=")]
    recipes = [*names[1:], *named, *([recipe] if recipe is not None else [])]
    if len(recipes) > 1:
        raise RecipeError(f"{recipes[1]!r}: a ladder varies one recipe, and {recipes[0]!r} is one (drop one of them)")
    return (names[0] if names else None), (recipes[0] if recipes else None), Patch.parse(overrides)


def _list(name: str | None, *, as_json: bool) -> None:
    """Print all shipped ladders, or the rungs of one."""
    if name is None:
        show_ladders([load_ladder(each) for each in ladder_names()], as_json=as_json)
    else:
        show_rungs(load_ladder(name), as_json=as_json)


def _ask(
    chosen: Ladder, recipe: str | None, overrides: Patch, ranks: str, *, steps: int | None, repeats: int | None
) -> _Asked:
    """Build the request. Raise `RecipeError` for arguments that a ladder does not take."""
    refuse_length(overrides, "a ladder", to="compare")
    refuse_ranks_of_others("ladder")
    for path, value in overrides.assignments:
        if path in settled_by(chosen.rungs[0].set):
            fix = f"leave it out, or copy the ladder and change its rung {chosen.rungs[0].name!r}"
            raise RecipeError(f"{path}: {value} has no effect on ladder {chosen.name}, which sets it ({fix})")
    loaded = load(recipe or chosen.recipe, overrides)
    base = loaded.recipe
    if chosen.warmup_steps is not None and "measure.warmup_steps" not in dict(overrides.assignments):
        base = vary(base, Patch((("measure.warmup_steps", chosen.warmup_steps),)))
    steps = steps or chosen.steps
    measured = vary(base, measuring_patch(base, steps, overrides, lr_share=FALLING))
    return _Asked(
        ladder=chosen if recipe is None else replace(chosen, recipe=recipe),
        loaded=loaded,
        recipe=measured,
        repeats=repeats or chosen.repeats,
        steps=steps,
        ranks=count_ranks(ranks, os.environ),
    )


def _climb(request: _Asked, folder: ExperimentDir, *, as_json: bool) -> LadderResult:
    """Run the ladder, and write its result."""
    out = progress_console(as_json=as_json)
    _write_recipes(request, folder)
    total = None if request.ladder.goes_on else request.repeats * (2 * len(request.ladder.rungs) - 1)
    with interrupted_by(*STOPS), telling(out, total) as (on_start, print_line):
        print_line(_plan(request, total))
        climbed = _climber(request, folder, on_start, print_line).climb()
    result = _result(request, climbed, folder)
    leave(folder, result)
    return result


def _run_task(request: _Asked, number: int, run_dir: Path | None, *, as_json: bool) -> int:
    """Run one repeat of one rung, in the ladder's folder."""
    task = find_task(_tasks(request), number)
    index, repeat = place_of(task, len(request.ladder.rungs))

    def run(folder: ExperimentDir, on_start: Begins, print_line: Say) -> Sequence[Outcome]:
        _write_recipes(request, folder)
        return _climber(request, folder, on_start, print_line).run_turn(index + 1, repeat)

    return run_task(request.plain, run_dir, task, run, as_json=as_json)


def _tasks(request: _Asked) -> tuple[Task, ...]:
    return ladder_tasks(request.ladder, request.repeats, request.ranks)


def _write_recipes(request: _Asked, folder: ExperimentDir) -> None:
    write_recipe(request.loaded.recipe, folder.recipe)
    write_recipe(request.recipe, folder.measured)


def _plan(request: _Asked, total: int | None) -> str:
    """Return how many runs and steps there are."""
    steps = count(request.recipe.measure.warmup_steps + request.steps, "step")
    runs = (
        f"up to {count(total, 'run')}" if total is not None else f"{count(request.repeats, 'pair')} of runs per rung,"
    )
    return f"ladder {request.ladder.name}: {runs} of {steps}"


def _climber(request: _Asked, folder: ExperimentDir, on_start: Begins, print_line: Say) -> Climber:
    from paceline.lab.cache import set_cache
    from paceline.lab.prepared import Form, Prepared, prepare
    from paceline.lab.proposing import propose
    from paceline.measure.timing import now_s

    hardware = Here(gpus=count_gpus(os.environ), cores=usable_cores(), ranks=request.ranks)

    def make(form: Form) -> Prepared:
        waits = partial(print_line, f"{form}: waiting for another task that prepares it")
        made = prepare(form, request.recipe.data, folder.data, workers=hardware.cores, now=now_s, waits=waits)
        if not made.is_known:
            print_line(f"{form}: prepared in {made.seconds:,.1f} s")
        return made

    def before(trial: Trial, repeat: int) -> None:
        on_start(trial, repeat)
        set_cache(resolve_batch(vary(request.recipe, trial.patch), trial.ranks or request.ranks), is_cold=trial.is_cold)

    runner = Runner(
        request.recipe,
        folder.measured,
        request.ranks,
        place=lambda trial, repeat: (
            folder.trials / folder_name(trial, request.recipe, trial.ranks or request.ranks, repeat)
        ),
        begins=before,
        earlier=Earlier(folder.replaced, print_line),
        limit_s=LIMIT_S,
        oversubscribe=request.oversubscribe,
    )
    return Climber(
        ladder=request.ladder,
        recipe=request.recipe,
        runner=runner,
        here=hardware,
        repeats=request.repeats,
        root=folder.path,
        prepare=make,
        propose=propose,
        say=print_line,
    )


def _of_steps(rung: RungResult, num_steps: int) -> RungResult:
    """Return the rung with the time of `num_steps` steps, if its step was timed."""
    return rung if rung.step_s is None else rung.model_copy(update={"steps_s": num_steps * rung.step_s})


def _result(request: _Asked, climbed: Climbed, folder: ExperimentDir) -> LadderResult:
    runs: Sequence[str] = [run for rung in climbed.rungs for run in rung.runs]
    measured_s = sum(RunDir(folder.path / run).read_result().time.wall_s for run in runs)
    first = request.ladder.rungs[0]
    lowest = resolve_batch(vary(request.recipe, first.patch), first.ranks or request.ranks)
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
        rungs=tuple(_of_steps(rung, request.steps) for rung in climbed.rungs),
        best=climbed.best.name,
        best_patch=tuple(words_of(climbed.best.patch)),
        stopped=climbed.stopped,
        wall_s=measured_s + sum(rung.prepare_s for rung in climbed.rungs),
        command=("paceline", *sys.argv[1:]),
        provenance=climbed.best.results[-1].provenance,
    )
