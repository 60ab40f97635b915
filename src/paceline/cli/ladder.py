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
    words: list[str],
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
    name, recipe, said = _split(words, recipe)
    if list_only:
        if task is not None:
            raise RecipeError(f"--task: {task} has no effect on a list (leave it out)")
        _list(name, as_json=as_json)
        return 0
    asked = _ask(load_ladder(name or _AUTO), recipe, said, ranks, steps=steps, repeats=repeats)
    asked = replace(asked, oversubscribe=oversubscribe)
    refuse_too_many(asked.ranks, asked.recipe.parallel.device, oversubscribe=oversubscribe)
    require_consent(asked.loaded, own_code=own_code)
    require_consent_to_rungs(asked.ladder, name or _AUTO, own_code=own_code)
    if task is not None:
        return _run_task(asked, task, run_dir, as_json=as_json)
    with experiment(f"ladder-{asked.ladder.name}", asked.plain, run_dir, as_json=as_json) as folder:
        result = found_before(folder, LadderResult) or _climb(asked, folder, as_json=as_json)
    show_ladder(result, folder, as_json=as_json)
    return 0


def tasks_of(
    words: list[str], ranks: str, *, recipe: str | None, steps: int | None, repeats: int | None
) -> tuple[Task, ...]:
    """Return the tasks of the ladder. Raise `RecipeError` for arguments that a ladder does not take."""
    name, recipe, said = _split(words, recipe)
    return _tasks(_ask(load_ladder(name or _AUTO), recipe, said, ranks, steps=steps, repeats=repeats))


def _split(words: list[str], recipe: str | None) -> tuple[str | None, str | None, Patch]:
    """Return the names of ladder and recipe, None if omitted, and the overrides."""
    names = [word for word in words if "=" not in word]
    overrides = [word for word in words if "=" in word and not word.startswith("recipe=")]
    named = [word.removeprefix("recipe=") for word in words if word.startswith("recipe=")]
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
    chosen: Ladder, recipe: str | None, said: Patch, ranks: str, *, steps: int | None, repeats: int | None
) -> _Asked:
    """Build the request. Raise `RecipeError` for arguments that a ladder does not take."""
    refuse_length(said, "a ladder", to="compare")
    refuse_ranks_of_others("ladder")
    for path, value in said.assignments:
        if path in settled_by(chosen.rungs[0].set):
            fix = f"leave it out, or copy the ladder and change its rung {chosen.rungs[0].name!r}"
            raise RecipeError(f"{path}: {value} has no effect on ladder {chosen.name}, which sets it ({fix})")
    loaded = load(recipe or chosen.recipe, said)
    base = loaded.recipe
    if chosen.warmup_steps is not None and "measure.warmup_steps" not in dict(said.assignments):
        base = vary(base, Patch((("measure.warmup_steps", chosen.warmup_steps),)))
    steps = steps or chosen.steps
    measured = vary(base, measuring_patch(base, steps, said, lr_share=FALLING))
    return _Asked(
        ladder=chosen if recipe is None else replace(chosen, recipe=recipe),
        loaded=loaded,
        recipe=measured,
        repeats=repeats or chosen.repeats,
        steps=steps,
        ranks=count_ranks(ranks, os.environ),
    )


def _climb(asked: _Asked, folder: ExperimentDir, *, as_json: bool) -> LadderResult:
    """Run the ladder, and write its result."""
    out = progress_console(as_json=as_json)
    _write_recipes(asked, folder)
    total = None if asked.ladder.goes_on else asked.repeats * (2 * len(asked.ladder.rungs) - 1)
    with interrupted_by(*STOPS), telling(out, total) as (begins, say):
        say(_plan(asked, total))
        climbed = _climber(asked, folder, begins, say).climb()
    result = _result(asked, climbed, folder)
    leave(folder, result)
    return result


def _run_task(asked: _Asked, number: int, run_dir: Path | None, *, as_json: bool) -> int:
    """Run one repeat of one rung, in the ladder's folder."""
    task = find_task(_tasks(asked), number)
    index, turn = place_of(task, len(asked.ladder.rungs))

    def run(folder: ExperimentDir, begins: Begins, say: Say) -> Sequence[Outcome]:
        _write_recipes(asked, folder)
        return _climber(asked, folder, begins, say).run_turn(index + 1, turn)

    return run_task(asked.plain, run_dir, task, run, as_json=as_json)


def _tasks(asked: _Asked) -> tuple[Task, ...]:
    return ladder_tasks(asked.ladder, asked.repeats, asked.ranks)


def _write_recipes(asked: _Asked, folder: ExperimentDir) -> None:
    write_recipe(asked.loaded.recipe, folder.recipe)
    write_recipe(asked.recipe, folder.measured)


def _plan(asked: _Asked, total: int | None) -> str:
    """Return how many runs and steps there are."""
    steps = count(asked.recipe.measure.warmup_steps + asked.steps, "step")
    runs = f"up to {count(total, 'run')}" if total is not None else f"{count(asked.repeats, 'pair')} of runs per rung,"
    return f"ladder {asked.ladder.name}: {runs} of {steps}"


def _climber(asked: _Asked, folder: ExperimentDir, begins: Begins, say: Say) -> Climber:
    from paceline.lab.cache import set_cache
    from paceline.lab.prepared import Form, Prepared, prepare
    from paceline.lab.proposing import propose
    from paceline.measure.timing import now_s

    here = Here(gpus=count_gpus(os.environ), cores=usable_cores(), ranks=asked.ranks)

    def make(form: Form) -> Prepared:
        waits = partial(say, f"{form}: waiting for another task that prepares it")
        made = prepare(form, asked.recipe.data, folder.data, workers=here.cores, now=now_s, waits=waits)
        if not made.is_known:
            say(f"{form}: prepared in {made.seconds:,.1f} s")
        return made

    def before(trial: Trial, repeat: int) -> None:
        begins(trial, repeat)
        set_cache(resolve_batch(vary(asked.recipe, trial.patch), trial.ranks or asked.ranks), is_cold=trial.is_cold)

    runner = Runner(
        asked.recipe,
        folder.measured,
        asked.ranks,
        place=lambda trial, repeat: (
            folder.trials / folder_name(trial, asked.recipe, trial.ranks or asked.ranks, repeat)
        ),
        begins=before,
        earlier=Earlier(folder.replaced, say),
        limit_s=LIMIT_S,
        oversubscribe=asked.oversubscribe,
    )
    return Climber(
        ladder=asked.ladder,
        recipe=asked.recipe,
        runner=runner,
        here=here,
        repeats=asked.repeats,
        root=folder.path,
        prepare=make,
        propose=propose,
        say=say,
    )


def _of_steps(rung: RungResult, num_steps: int) -> RungResult:
    """Return the rung with the time of `num_steps` steps, if its step was timed."""
    return rung if rung.step_s is None else rung.model_copy(update={"steps_s": num_steps * rung.step_s})


def _result(asked: _Asked, climbed: Climbed, folder: ExperimentDir) -> LadderResult:
    runs: Sequence[str] = [run for rung in climbed.rungs for run in rung.runs]
    measured_s = sum(RunDir(folder.path / run).read_result().time.wall_s for run in runs)
    first = asked.ladder.rungs[0]
    lowest = resolve_batch(vary(asked.recipe, first.patch), first.ranks or asked.ranks)
    return LadderResult(
        ladder=asked.ladder.name,
        summary=asked.ladder.summary,
        recipe=asked.loaded.name,
        recipe_hash=asked.loaded.recipe.hash,
        ranks=asked.ranks,
        steps=asked.steps,
        warmup_steps=asked.recipe.measure.warmup_steps,
        repeats=asked.repeats,
        batch_size=lowest.data.global_batch_size,
        rungs=tuple(_of_steps(rung, asked.steps) for rung in climbed.rungs),
        best=climbed.best.name,
        best_patch=tuple(words_of(climbed.best.patch)),
        stopped=climbed.stopped,
        wall_s=measured_s + sum(rung.prepare_s for rung in climbed.rungs),
        command=("paceline", *sys.argv[1:]),
        provenance=climbed.best.results[-1].provenance,
    )
