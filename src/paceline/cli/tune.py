"""`paceline tune`: search the fastest settings of a recipe on this machine."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from paceline.cli.args import refuse_length, split_recipe_args
from paceline.cli.experiment import Session, ShortRuns, plan_short_runs, refuse_launcher, run_experiment
from paceline.cli.options import TuneOptions
from paceline.core.errors import PacelineError, RecipeError
from paceline.core.experiments.experiment_dir import ExperimentDir
from paceline.core.experiments.results import TuneResult
from paceline.core.run_dir import RunDir
from paceline.core.statistics import Interval
from paceline.core.units import count
from paceline.lab.ab_test import TrialBench, format_speedup
from paceline.lab.patches import REDUCED_LR_SHARE, merge_patches
from paceline.lab.search_space import SearchSpace, build_search_space
from paceline.lab.trial import apply_patch, format_patch
from paceline.lab.tune import Search, SearchResult, format_tuned_recipe, write_tuned_recipe
from paceline.models.weights_recipe import with_weights_defaults
from paceline.recipe.load import Patch, load
from paceline.recipe.plan import divide_batch, resolve_batch
from paceline.recipe.schema import Recipe

TUNED_RECIPE: Final = "tuned.yaml"


@dataclass(frozen=True)
class _TuneRequest:
    """Short runs of the recipe `name` with `overrides`, and the settings to try."""

    name: str
    overrides: Patch
    runs: ShortRuns
    space: SearchSpace
    options: TuneOptions
    budget: int | None

    def apply(self, patch: Patch) -> Recipe | None:
        """Return the measured recipe with `patch`; None if it does not fit."""
        try:
            apply_patch(self.runs.loaded.recipe, patch)
            varied = apply_patch(self.runs.recipe, patch)
            divide_batch(varied, self.runs.ranks)
        except RecipeError:
            return None
        return varied


def tune(options: TuneOptions) -> int:
    """Run `paceline tune`, and return the exit code."""
    for option, value in (("--search", options.search), ("--seeds", options.seeds)):
        if value is not None:
            raise RecipeError(f"{option}: {value} has no effect on a search for speed (add --learn, or leave it out)")
    request = _build_request(options)
    runs = request.runs
    key = {
        "verb": "tune",
        "recipe": runs.recipe.to_dict(),
        "vary": options.vary,
        "allow_batch": options.allow_batch,
        "ranks": runs.ranks,
        "steps": options.steps,
        "repeats": options.repeats,
        "budget": request.budget,
    }
    work = partial(_run_search, request)
    return run_experiment(f"tune-{runs.loaded.name}", key, options, work, total=request.budget)


def _build_request(options: TuneOptions) -> _TuneRequest:
    name, overrides = split_recipe_args(options.args)
    refuse_length(overrides, "a search", purpose="compare")
    refuse_launcher("tune")
    # The recipe and one candidate, then pairs of both.
    least, budget = 2 + 2 * options.repeats, _parse_budget(options.budget)
    if budget is not None and budget < least:
        needs = f"the recipe, one change, and {count(options.repeats, 'pair')}"
        fix = "raise it, or lower --repeats"
        raise RecipeError(f"--budget: {budget} is less than the {least} runs of {needs} ({fix})")
    runs = plan_short_runs(name, overrides, options, lr_share=REDUCED_LR_SHARE)
    divide_batch(runs.recipe, runs.ranks)
    space = build_search_space(options.vary, runs.recipe, allow_batch=options.allow_batch)
    return _TuneRequest(name, overrides, runs, space, options, budget)


def _parse_budget(text: str | None) -> int | None:
    if text is None or text.isdecimal():
        return None if text is None else int(text)
    raise RecipeError(f"--budget: {text!r} is not a number of runs (write 20; times are for --learn)")


def _run_search(request: _TuneRequest, session: Session) -> TuneResult:
    runs, budget = request.runs, request.budget
    most = "" if budget is None else f"up to {count(budget, 'run')}, "
    pairs = f"{count(runs.repeats, 'pair')} of runs per promising candidate"
    session.print_line(f"tuning {runs.loaded.name}: {most}{pairs}")
    outcome = Search(
        bench=TrialBench(runs.recipe, runs.build_runner(session).run),
        space=request.space,
        apply_patch=request.apply,
        steps=runs.steps,
        repeats=runs.repeats,
        budget=budget,
        report=session.print_line,
    ).search()
    _write_tuned_recipe(request, outcome, session.folder.path / TUNED_RECIPE)
    return _build_result(runs, outcome, session.folder)


def _write_tuned_recipe(request: _TuneRequest, outcome: SearchResult, path: Path) -> None:
    comments = {
        path: f"{tried.name}: {tried.why}"
        for tried in outcome.tried
        if tried.status == "won"
        for path, _ in Patch.parse(list(tried.patch)).assignments
    }
    loaded = request.runs.loaded
    header = f"{loaded.name}, tuned: {_gain_text(outcome.gain)} over {count(outcome.trials, 'run')}."
    patch = merge_patches(loaded.recipe, request.overrides, outcome.patch)
    write_tuned_recipe(path, format_tuned_recipe(request.name, patch, comments, header))
    check_tuned_recipe(path, request.runs, outcome.patch)


def check_tuned_recipe(path: Path, runs: ShortRuns, patch: Patch) -> None:
    """Assert that the written recipe is that of the runs with `patch`."""
    tuned = resolve_batch(with_weights_defaults(load(str(path))).recipe, runs.ranks)
    assert tuned == apply_patch(runs.loaded.recipe, patch), f"{path} differs from the winning recipe"


def _gain_text(gain: Interval | None) -> str:
    return "nothing was faster" if gain is None else format_speedup(gain, word="x as fast")


def _build_result(runs: ShortRuns, outcome: SearchResult, folder: ExperimentDir) -> TuneResult:
    return TuneResult(
        **runs.result_fields,
        first=outcome.first,
        best=outcome.best,
        gain=outcome.gain,
        best_patch=tuple(format_patch(outcome.patch)),
        recipe_file=str(folder.path / TUNED_RECIPE),
        tried=outcome.tried,
        trials=outcome.trials,
        grid=outcome.grid,
        stopped=outcome.stopped,
        wall_s=sum(_wall_s(path) for path in sorted(folder.trials.iterdir())),
        provenance=outcome.best_run.provenance,
        first_verdict=outcome.first_run.verdict,
        verdict=outcome.best_run.verdict,
    )


def _wall_s(path: Path) -> float:
    try:
        return RunDir(path).read_result().time.wall_s
    except PacelineError:
        return 0.0
