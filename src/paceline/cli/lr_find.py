"""`paceline lr-find`: suggest a learning rate from short runs whose rate rises from step to step."""

import math
from functools import partial

from paceline.cli.args import split_recipe_args
from paceline.cli.experiment import (
    Session,
    ShortRuns,
    plan_short_runs,
    raise_failed,
    refuse_launcher,
    run_experiment,
)
from paceline.cli.options import LrFindOptions
from paceline.core.errors import NonFiniteLossError, PacelineError, RecipeError
from paceline.core.experiments.results import LrFindResult
from paceline.core.run_dir import read_lines
from paceline.core.units import number
from paceline.lab.lr_find import MIN_STEPS, list_rates, suggest_lr
from paceline.lab.patches import build_range_test_patch
from paceline.lab.trial import Trial, TrialOutcome
from paceline.recipe.plan import divide_batch


def lr_find(options: LrFindOptions) -> int:
    """Run `paceline lr-find`, and return the exit code."""
    if not 0 < options.low < options.high < math.inf:
        raise RecipeError(
            f"--from, --to: {options.low:g} to {options.high:g} does not rise from above 0 (write 1e-7 and 10)"
        )
    name, overrides = split_recipe_args(options.args)
    refuse_launcher("lr-find")
    runs = plan_short_runs(
        name,
        overrides,
        options,
        build_patch=lambda recipe: build_range_test_patch(recipe, options.steps, options.low, options.high),
    )
    divide_batch(runs.recipe, runs.ranks)
    key = {
        "verb": "lr-find",
        "recipe": runs.recipe.to_dict(),
        "lr": runs.loaded.recipe.optim.lr,
        "ranks": runs.ranks,
        "repeats": options.repeats,
    }
    work = partial(_run_tests, runs, options)
    return run_experiment(f"lr-find-{runs.loaded.name}", key, options, work, total=options.repeats)


def _run_tests(runs: ShortRuns, options: LrFindOptions, session: Session) -> LrFindResult:
    runner = runs.build_runner(session, is_timed=False)
    trial = Trial("range-test", repeats=options.repeats, first_seed=runs.recipe.seed)
    rates = list_rates(options.low, options.high, options.steps)
    outcomes, losses = [], []
    for turn in range(1, options.repeats + 1):
        outcome = runner.run(trial.in_turn(turn), turn)
        outcomes.append(outcome)
        losses.append(_read_losses(outcome))
        reached = rates[len(losses[-1]) - 1]
        session.print_line(f"run {turn}: {len(losses[-1])} of {options.steps} steps, up to lr {number(reached)}")
    results = [outcome.result for outcome in outcomes if outcome.result is not None]
    recipe = runs.loaded.recipe
    suggestion = suggest_lr(rates, losses, is_pretrained=recipe.model.weights != "off")
    fields = {key: value for key, value in runs.result_fields.items() if key != "warmup_steps"}
    return LrFindResult(
        **fields,
        batch_size=recipe.data.global_batch_size,
        lr=recipe.optim.lr,
        suggestion=suggestion.lr,
        rule=suggestion.rule,
        caution=suggestion.caution,
        rates=rates,
        losses=tuple(losses),
        smoothed=suggestion.smoothed,
        runs=tuple(outcome.folder for outcome in outcomes),
        wall_s=sum(result.time.wall_s for result in results),
        provenance=results[0].provenance if results else {},
    )


def _read_losses(outcome: TrialOutcome) -> tuple[float, ...]:
    """Return the losses of a run, of which one that became NaN or infinite has those before that step."""
    if outcome.result is None and outcome.exit_code != NonFiniteLossError.exit_code:
        raise_failed(outcome)
    losses = tuple(row["loss"] for row in read_lines(outcome.rundir.steps, of_steps=True))
    if len(losses) < MIN_STEPS:
        raise PacelineError(
            f"--from: the loss diverged within {len(losses)} steps (set --from to a hundredth, and look at the data)"
        )
    return losses
