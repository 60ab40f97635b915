"""`paceline tune --learn`: search settings that change what is learned, by short trainings on a budget."""

from functools import partial
from typing import Final

from paceline.cli.args import split_recipe_args
from paceline.cli.experiment import Session, ShortRuns, plan_short_runs, raise_failed, refuse_launcher, run_experiment
from paceline.cli.options import TuneOptions
from paceline.cli.tune import TUNED_RECIPE, check_tuned_recipe
from paceline.core.errors import RecipeError
from paceline.core.experiments.results import LearnResult
from paceline.core.metric import format_metric, metric_label
from paceline.core.statistics import Interval, difference_interval, mean_interval
from paceline.lab.learn import (
    BASE,
    MIN_CANDIDATES,
    Budget,
    LearnSearch,
    LearnSpace,
    compute_cost,
    count_candidates,
    default_space,
    read_space,
)
from paceline.lab.patches import merge_patches
from paceline.lab.trial import format_patch
from paceline.lab.tune import format_tuned_recipe, write_tuned_recipe
from paceline.recipe.load import Patch
from paceline.recipe.plan import divide_batch

_BUDGET: Final = "16"
_SEEDS: Final = 3


def tune_learn(options: TuneOptions) -> int:
    """Run `paceline tune --learn`, and return the exit code."""
    for option, is_set in (
        ("--vary", options.vary),
        ("--allow-batch", options.allow_batch),
        ("--steps", options.steps != TuneOptions.steps),
        ("--repeats", options.repeats != TuneOptions.repeats),
    ):
        if is_set:
            raise RecipeError(f"{option}: has no effect with --learn (use --search, --budget and --seeds)")
    name, overrides = split_recipe_args(options.args)
    refuse_launcher("tune")
    runs = plan_short_runs(name, overrides, options, build_patch=lambda recipe: Patch())
    recipe = runs.recipe
    divide_batch(recipe, runs.ranks)
    if recipe.train.eval_every == "off":
        raise RecipeError("train.eval_every: off leaves no accuracy to compare (set train.eval_every=1ep)")
    space = default_space(recipe) if options.search is None else read_space(options.search, recipe)
    text, seeds = options.budget or _BUDGET, options.seeds or _SEEDS
    budget = Budget.parse(text)
    if budget.runs is not None and not count_candidates(budget.runs, seeds):
        needs = f"{MIN_CANDIDATES} candidates and {seeds} final seeds"
        least = compute_cost(MIN_CANDIDATES, seeds)
        raise RecipeError(f"--budget: {text} is less than the {least:.1f} full training runs of {needs} (raise it)")
    key = {
        "verb": "tune --learn",
        "recipe": recipe.to_dict(),
        "space": {path: dimension.model_dump(mode="json") for path, dimension in space.items()},
        "ranks": runs.ranks,
        "seeds": seeds,
        "budget": text,
    }
    work = partial(_run_search, runs, name, overrides, space, budget, text, seeds)
    return run_experiment(f"tune-{runs.loaded.name}", key, options, work)


def _run_search(
    runs: ShortRuns,
    name: str,
    overrides: Patch,
    space: LearnSpace,
    budget: Budget,
    budget_text: str,
    seeds: int,
    session: Session,
) -> LearnResult:
    runner = runs.build_runner(session, is_timed=False)
    search = LearnSearch(runs.recipe, space, seeds, budget, runner.run, raise_failed, session.print_line)
    best, patch, values, recipe_values = search.search()
    first = search.outcomes[0].result
    assert first is not None, "the search fails if the recipe does"
    metric, is_minimized = search.trials[0].metric, search.trials[0].is_minimized
    gain = difference_interval(values, recipe_values) if values and recipe_values else None
    is_better = gain is not None and (gain.value < 0 if is_minimized else gain.value > 0)
    sentence = describe_gain(best, gain, metric, is_minimized=is_minimized)
    path = session.folder.path / TUNED_RECIPE
    winner = patch if is_better else Patch()
    merged = merge_patches(runs.loaded.recipe, overrides, winner)
    write_tuned_recipe(path, format_tuned_recipe(name, merged, {}, f"{runs.loaded.name}, tuned: {sentence}"))
    check_tuned_recipe(path, runs, winner)
    fields = runs.result_fields
    return LearnResult(
        recipe=fields["recipe"],
        recipe_hash=fields["recipe_hash"],
        ranks=runs.ranks,
        metric=metric,
        is_minimized=is_minimized,
        seeds=seeds,
        budget=budget_text,
        space=tuple(f"{path}: {dimension}" for path, dimension in space.items()),
        trials=tuple(search.trials),
        best=best,
        best_patch=tuple(format_patch(patch)),
        best_value=mean_interval(values) if values else None,
        recipe_value=mean_interval(recipe_values) if recipe_values else None,
        gain=gain,
        sentence=sentence,
        recipe_file=str(path),
        spent=search.spent,
        wall_s=sum(trial.wall_s for trial in search.trials),
        command=fields["command"],
        provenance=first.provenance,
    )


def describe_gain(best: str, gain: Interval | None, metric: str, *, is_minimized: bool) -> str:
    """Return a sentence on whether the best candidate beats the recipe."""
    label = metric_label(metric)
    if gain is None:
        return f"{best} could not be compared with {BASE}: its final runs failed."
    sign = -1 if is_minimized else 1
    is_better = sign * gain.value > 0
    change = f"{label} of {best} is {format_metric(metric, abs(gain.value))} {'better' if is_better else 'worse'}"
    if gain.low is None or gain.high is None:
        return f"{change} than that of {BASE} in one seed, which does not show a difference."
    bounds = f"{format_metric(metric, gain.low)} to {format_metric(metric, gain.high)}"
    scope = f"difference {bounds}, 95 % confidence, {gain.n} seeds each"
    if gain.is_above(0) or gain.is_below(0):
        return f"{change} than that of {BASE} ({scope})."
    return f"{change} than that of {BASE}, but the interval contains 0 ({scope}): chance may explain it."
