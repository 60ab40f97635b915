"""`paceline tune`: search the fastest settings of a recipe on this machine."""

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from paceline.cli.args import count_ranks, refuse_length, split_recipe_args
from paceline.cli.experiment import (
    RUN_TIMEOUT_S,
    STOP_SIGNALS,
    finish_experiment,
    locked_experiment,
    read_finished,
    refuse_launcher,
    show_experiment,
    warm_cache_before,
)
from paceline.cli.options import TuneOptions
from paceline.cli.progress_output import progress_output
from paceline.cli.ranks import refuse_too_many
from paceline.core.console import progress_console
from paceline.core.errors import PacelineError, RecipeError
from paceline.core.experiments.experiment_dir import ExperimentDir
from paceline.core.experiments.results import TuneResult
from paceline.core.run_dir import RunDir
from paceline.core.statistics import Interval
from paceline.core.units import count
from paceline.lab.ab_test import TrialBench, format_speedup
from paceline.lab.patches import REDUCED_LR_SHARE, build_measurement_patch, merge_patches
from paceline.lab.runner import ReusePolicy, TrialRunner, interrupt_on_signals
from paceline.lab.search_space import SearchSpace, build_search_space
from paceline.lab.trial import apply_patch, build_run_name, format_patch, write_recipe
from paceline.lab.tune import Search, SearchResult, format_tuned_recipe, write_tuned_recipe
from paceline.recipe.consent import require_consent
from paceline.recipe.load import LoadedRecipe, Patch, load
from paceline.recipe.plan import divide_batch, resolve_batch
from paceline.recipe.schema import Recipe

_TUNED_RECIPE: Final = "tuned.yaml"


@dataclass(frozen=True)
class _TuneRequest:
    """Request; `recipe` is `loaded`, which is `name` with `overrides`, with the settings of a measurement."""

    name: str
    overrides: Patch
    loaded: LoadedRecipe
    recipe: Recipe
    space: SearchSpace
    ranks: int
    options: TuneOptions

    @property
    def key_values(self) -> dict[str, Any]:
        """All that the runs depend on."""
        options = self.options
        space = {"vary": options.vary, "allow_batch": options.allow_batch}
        length = {"ranks": self.ranks, "steps": options.steps, "repeats": options.repeats, "budget": options.budget}
        return {"verb": "tune", "recipe": self.recipe.to_dict(), **space, **length}

    def apply(self, patch: Patch) -> Recipe | None:
        """Return the measured recipe with `patch`; None if it does not fit."""
        try:
            apply_patch(self.loaded.recipe, patch)
            varied = apply_patch(self.recipe, patch)
            divide_batch(varied, self.ranks)
        except RecipeError:
            return None
        return varied


def tune(options: TuneOptions) -> int:
    """Run `paceline tune`, and return the exit code."""
    request = _build_request(options)
    as_json = options.as_json
    name, key = f"tune-{request.loaded.name}", request.key_values
    with locked_experiment(name, key, options.run_dir, as_json=as_json) as folder:
        result = read_finished(folder, TuneResult) or _run_search(request, folder, as_json=as_json)
    show_experiment(result, folder, as_json=as_json)
    return 0


def _build_request(options: TuneOptions) -> _TuneRequest:
    name, overrides = split_recipe_args(options.args)
    refuse_length(overrides, "a search", purpose="compare")
    refuse_launcher("tune")
    loaded = load(name, overrides)
    require_consent(loaded, own_code=options.own_code)
    # The recipe and one candidate, then pairs of both.
    least = 2 + 2 * options.repeats
    if options.budget is not None and options.budget < least:
        needs = f"the recipe, one change, and {count(options.repeats, 'pair')}"
        fix = "raise it, or lower --repeats"
        raise RecipeError(f"--budget: {options.budget} is less than the {least} runs of {needs} ({fix})")
    num_ranks = count_ranks(options.ranks, os.environ)
    refuse_too_many(num_ranks, loaded.recipe.parallel.device, oversubscribe=options.oversubscribe)
    loaded = replace(loaded, recipe=resolve_batch(loaded.recipe, num_ranks))
    measured = apply_patch(
        loaded.recipe, build_measurement_patch(loaded.recipe, options.steps, overrides, lr_share=REDUCED_LR_SHARE)
    )
    divide_batch(measured, num_ranks)
    return _TuneRequest(
        name=name,
        overrides=overrides,
        loaded=loaded,
        recipe=measured,
        space=build_search_space(options.vary, measured, allow_batch=options.allow_batch),
        ranks=num_ranks,
        options=options,
    )


def _run_search(request: _TuneRequest, folder: ExperimentDir, *, as_json: bool) -> TuneResult:
    out = progress_console(as_json=as_json)
    write_recipe(request.loaded.recipe, folder.recipe)
    write_recipe(request.recipe, folder.measured)
    with interrupt_on_signals(*STOP_SIGNALS), progress_output(out, request.options.budget) as (on_start, print_line):
        budget, pairs = request.options.budget, count(request.options.repeats, "pair")
        most = "" if budget is None else f"up to {count(budget, 'run')}, "
        print_line(f"tuning {request.loaded.name}: {most}{pairs} of runs per promising candidate")

        runner = TrialRunner(
            request.recipe,
            folder.measured,
            request.ranks,
            get_folder=lambda trial, repeat: (
                folder.trials / build_run_name(trial, request.recipe, request.ranks, repeat)
            ),
            before_run=warm_cache_before(request.recipe, on_start),
            reuse_policy=ReusePolicy(folder.replaced, print_line),
            timeout_s=RUN_TIMEOUT_S,
            oversubscribe=request.options.oversubscribe,
        )
        outcome = Search(
            bench=TrialBench(request.recipe, runner.run),
            space=request.space,
            apply_patch=request.apply,
            steps=request.options.steps,
            repeats=request.options.repeats,
            budget=request.options.budget,
            report=print_line,
        ).search()
    _write_tuned_recipe(request, outcome, folder.path / _TUNED_RECIPE)
    result = _build_result(request, outcome, folder)
    finish_experiment(folder, result)
    return result


def _write_tuned_recipe(request: _TuneRequest, outcome: SearchResult, path: Path) -> None:
    comments = {
        path: f"{tried.name}: {tried.why}"
        for tried in outcome.tried
        if tried.status == "won"
        for path, _ in Patch.parse(list(tried.patch)).assignments
    }
    header = f"{request.loaded.name}, tuned: {_gain_text(outcome.gain)} over {count(outcome.trials, 'run')}."
    patch = merge_patches(request.loaded.recipe, request.overrides, outcome.patch)
    write_tuned_recipe(path, format_tuned_recipe(request.name, patch, comments, header))
    tuned = resolve_batch(load(str(path)).recipe, request.ranks)
    assert tuned == apply_patch(request.loaded.recipe, outcome.patch), f"{path} differs from the winning recipe"


def _gain_text(gain: Interval | None) -> str:
    return "nothing was faster" if gain is None else format_speedup(gain, word="x as fast")


def _build_result(request: _TuneRequest, outcome: SearchResult, folder: ExperimentDir) -> TuneResult:
    return TuneResult(
        recipe=request.loaded.name,
        recipe_hash=request.loaded.recipe.hash,
        ranks=request.ranks,
        steps=request.options.steps,
        warmup_steps=request.recipe.measure.warmup_steps,
        repeats=request.options.repeats,
        first=outcome.first,
        best=outcome.best,
        gain=outcome.gain,
        best_patch=tuple(format_patch(outcome.patch)),
        recipe_file=str(folder.path / _TUNED_RECIPE),
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
    try:
        return RunDir(path).read_result().time.wall_s
    except PacelineError:
        return 0.0
