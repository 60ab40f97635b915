"""`paceline tune`: search the fastest settings of a recipe on this machine by short runs, and write a recipe with them.

A search's folder holds one run directory per run. The same command resumes it.
"""

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from paceline.cli.experiment import (
    LIMIT_S,
    STOPS,
    experiment,
    files_cached_before,
    found_before,
    leave,
    refuse_ranks_of_others,
)
from paceline.cli.ranks import refuse_too_many
from paceline.cli.show_tune import show_tune
from paceline.cli.telling import telling
from paceline.cli.words import count_ranks, refuse_length, split_words
from paceline.core.console import progress_console
from paceline.core.errors import PacelineError, RecipeError
from paceline.core.experiments.folder import ExperimentDir
from paceline.core.experiments.tuning import TuneResult
from paceline.core.interval import Interval
from paceline.core.rundir import RunDir
from paceline.core.units import count
from paceline.lab.duel import Bench
from paceline.lab.earlier import Earlier
from paceline.lab.laying import lay
from paceline.lab.measuring import FALLING, measuring_patch
from paceline.lab.runner import Runner, interrupted_by
from paceline.lab.space import Space, build_space
from paceline.lab.times import times
from paceline.lab.trial import folder_name, vary, words_of, write_recipe
from paceline.lab.tune import Found, Search
from paceline.lab.tuned import tuned_text, write_tuned
from paceline.recipe.consent import require_consent
from paceline.recipe.load import Loaded, load
from paceline.recipe.patch import Patch
from paceline.recipe.plan import divide_batch, resolve_batch
from paceline.recipe.schema import Recipe

_TUNED: Final = "tuned.yaml"


@dataclass(frozen=True)
class _Asked:
    """Request: `recipe` is the measured form of `loaded`, which is `name` with the overrides `said`."""

    name: str
    said: Patch
    loaded: Loaded
    recipe: Recipe
    space: Space
    vary: tuple[str, ...]
    allow_batch: bool
    ranks: int
    steps: int
    repeats: int
    budget: int | None
    oversubscribe: bool = False

    @property
    def plain(self) -> dict[str, Any]:
        """Everything that the runs depend on, as plain values."""
        space = {"vary": list(self.vary), "allow_batch": self.allow_batch}
        length = {"ranks": self.ranks, "steps": self.steps, "repeats": self.repeats, "budget": self.budget}
        return {"verb": "tune", "recipe": self.recipe.to_dict(), **space, **length}

    def lay(self, patch: Patch) -> Recipe | None:
        """Return the measured recipe with `patch` applied; None if the patch does not fit."""
        try:
            vary(self.loaded.recipe, patch)
            varied = vary(self.recipe, patch)
            divide_batch(varied, self.ranks)
        except RecipeError:
            return None
        return varied


def tune(
    args: list[str],
    ranks: str,
    run_dir: Path | None,
    *,
    steps: int,
    repeats: int,
    vary: list[str],
    allow_batch: bool,
    budget: int | None,
    own_code: bool = False,
    as_json: bool,
    oversubscribe: bool = False,
) -> int:
    """Run `paceline tune`, and return the exit code."""
    name, overrides = split_words(args)
    refuse_length(overrides, "a search", to="compare")
    refuse_ranks_of_others("tune")
    request = _ask(
        name,
        overrides,
        ranks,
        vary,
        allow_batch=allow_batch,
        steps=steps,
        repeats=repeats,
        budget=budget,
        oversubscribe=oversubscribe,
    )
    require_consent(request.loaded, own_code=own_code)
    with experiment(f"tune-{request.loaded.name}", request.plain, run_dir, as_json=as_json) as folder:
        result = found_before(folder, TuneResult) or _search(request, folder, as_json=as_json)
    show_tune(result, folder, as_json=as_json)
    return 0


def _ask(
    name: str,
    overrides: Patch,
    ranks: str,
    args: list[str],
    *,
    allow_batch: bool,
    steps: int,
    repeats: int,
    budget: int | None,
    oversubscribe: bool,
) -> _Asked:
    loaded = load(name, overrides)
    least = 2 + 2 * repeats
    if budget is not None and budget < least:
        needs = f"the recipe, one change, and {count(repeats, 'pair')}"
        raise RecipeError(f"--budget: {budget} is less than the {least} runs of {needs} (raise it, or lower --repeats)")
    num_ranks = count_ranks(ranks, os.environ)
    refuse_too_many(num_ranks, loaded.recipe.parallel.device, oversubscribe=oversubscribe)
    loaded = replace(loaded, recipe=resolve_batch(loaded.recipe, num_ranks))
    measured = vary(loaded.recipe, measuring_patch(loaded.recipe, steps, overrides, lr_share=FALLING))
    divide_batch(measured, num_ranks)
    return _Asked(
        name=name,
        said=overrides,
        loaded=loaded,
        recipe=measured,
        space=build_space(args, measured, allow_batch=allow_batch),
        vary=tuple(args),
        allow_batch=allow_batch,
        ranks=num_ranks,
        steps=steps,
        repeats=repeats,
        budget=budget,
        oversubscribe=oversubscribe,
    )


def _search(request: _Asked, folder: ExperimentDir, *, as_json: bool) -> TuneResult:
    """Search, and write the tuned recipe and the result."""
    out = progress_console(as_json=as_json)
    write_recipe(request.loaded.recipe, folder.recipe)
    write_recipe(request.recipe, folder.measured)
    with interrupted_by(*STOPS), telling(out, request.budget) as (on_start, print_line):
        most = "" if request.budget is None else f"up to {count(request.budget, 'run')}, "
        print_line(
            f"tuning {request.loaded.name}: {most}{count(request.repeats, 'pair')} of runs per promising candidate"
        )

        runner = Runner(
            request.recipe,
            folder.measured,
            request.ranks,
            place=lambda trial, repeat: folder.trials / folder_name(trial, request.recipe, request.ranks, repeat),
            begins=files_cached_before(request.recipe, on_start),
            earlier=Earlier(folder.replaced, print_line),
            limit_s=LIMIT_S,
            oversubscribe=request.oversubscribe,
        )
        outcome = Search(
            bench=Bench(request.recipe, runner.run),
            space=request.space,
            vary=request.lay,
            steps=request.steps,
            repeats=request.repeats,
            budget=request.budget,
            say=print_line,
        ).search()
    _write_tuned(request, outcome, folder.path / _TUNED)
    result = _result(request, outcome, folder)
    leave(folder, result)
    return result


def _write_tuned(request: _Asked, outcome: Found, path: Path) -> None:
    """Write the winning recipe: the loaded one with the best patch applied."""
    comments = {
        path: f"{tried.name}: {tried.why}"
        for tried in outcome.tried
        if tried.status == "won"
        for path, _ in Patch.parse(list(tried.patch)).assignments
    }
    header = f"{request.loaded.name}, tuned: {_gain(outcome.gain)} over {count(outcome.trials, 'run')}."
    patch = lay(request.loaded.recipe, request.said, outcome.patch)
    write_tuned(path, tuned_text(request.name, patch, comments, header))
    tuned = resolve_batch(load(str(path)).recipe, request.ranks)
    assert tuned == vary(request.loaded.recipe, outcome.patch), f"{path} differs from the winning recipe"


def _gain(gain: Interval | None) -> str:
    return "nothing was faster" if gain is None else times(gain, word="x as fast")


def _result(request: _Asked, outcome: Found, folder: ExperimentDir) -> TuneResult:
    return TuneResult(
        recipe=request.loaded.name,
        recipe_hash=request.loaded.recipe.hash,
        ranks=request.ranks,
        steps=request.steps,
        warmup_steps=request.recipe.measure.warmup_steps,
        repeats=request.repeats,
        first=outcome.first,
        best=outcome.best,
        gain=outcome.gain,
        best_patch=tuple(words_of(outcome.patch)),
        recipe_file=str(folder.path / _TUNED),
        tried=outcome.tried,
        trials=outcome.trials,
        grid=outcome.grid,
        stopped=outcome.stopped,
        wall_s=sum(_wall_s(path) for path in sorted(folder.trials.iterdir())),
        command=("paceline", *sys.argv[1:]),
        provenance=outcome.best_run.provenance,
        first_verdict=outcome.first_run.verdict,
        verdict=outcome.best_run.verdict,
    )


def _wall_s(path: Path) -> float:
    """Return the wall-clock time of a run in seconds, 0 if it failed."""
    try:
        return RunDir(path).read_result().time.wall_s
    except PacelineError:
        return 0.0
