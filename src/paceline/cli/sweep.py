"""`paceline profile --vary`: a short profile for each value of a setting."""

from functools import partial

from paceline.cli.args import refuse_length, split_recipe_args
from paceline.cli.experiment import (
    Session,
    ShortRuns,
    describe_outcome,
    plan_short_runs,
    raise_failed,
    refuse_launcher,
    run_experiment,
)
from paceline.cli.options import ProfileOptions
from paceline.core.errors import RecipeError
from paceline.core.experiments.results import SweepResult
from paceline.core.units import count
from paceline.lab.repeat import alternate_order, run_interleaved
from paceline.lab.sweep import Sweep, build_sweep, build_sweep_points, summarize_sweep


def sweep(options: ProfileOptions) -> int:
    """Run `paceline profile --vary`, and return the exit code."""
    if options.trace or options.nvtx:
        given = "trace" if options.trace else "nvtx"
        raise RecipeError(f"--{given}: slows down the runs that --vary compares (leave one out)")
    name, overrides = split_recipe_args(options.args)
    refuse_length(overrides, "a profile", purpose="profile")
    refuse_launcher("profile --vary")
    runs = plan_short_runs(name, overrides, options)
    measure = runs.loaded.recipe.measure
    if measure.trace != "off" or measure.nvtx != "off":
        raise RecipeError("--vary: compares speeds, which traces and NVTX ranges change (leave measure.* out)")
    varied = build_sweep(options.vary, runs.recipe, runs.ranks, options.repeats)
    key = {
        "verb": "profile --vary",
        "recipe": runs.recipe.to_dict(),
        "values": [trial.name for trial in varied.trials],
        "ranks": runs.ranks,
        "steps": options.steps,
        "repeats": options.repeats,
    }
    work, total = partial(_run_sweep, runs, varied), len(varied.trials) * options.repeats
    return run_experiment(f"profile-vary-{runs.loaded.name}", key, options, work, total=total)


def _run_sweep(runs: ShortRuns, varied: Sweep, session: Session) -> SweepResult:
    trials, outcomes = varied.trials, []
    session.print_line(f"{count(len(trials) * runs.repeats, 'run')} of {count(runs.total_steps, 'step')}")
    runner = runs.build_runner(session)
    for outcome in run_interleaved(lambda repeat: alternate_order(trials, repeat), runs.repeats, runner):
        session.print_line(describe_outcome(outcome, runs.repeats))
        outcomes.append(outcome)
    results = [outcome.result for outcome in outcomes if outcome.result is not None]
    if not results:
        raise_failed(outcomes[0])
    points = build_sweep_points(trials, outcomes)
    fastest, sentence = summarize_sweep(points)
    return SweepResult(
        **runs.result_fields,
        key=varied.key,
        points=points,
        fastest=fastest,
        sentence=sentence,
        wall_s=sum(result.time.wall_s for result in results),
        provenance=results[0].provenance,
    )
