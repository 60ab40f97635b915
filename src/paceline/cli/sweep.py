"""`paceline profile --vary`: a short profile for each value of a setting."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

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
from paceline.cli.options import ProfileOptions
from paceline.cli.progress_output import progress_output
from paceline.cli.ranks import refuse_too_many
from paceline.core.console import progress_console
from paceline.core.errors import RecipeError
from paceline.core.experiments.experiment_dir import ExperimentDir
from paceline.core.experiments.results import SweepResult
from paceline.core.units import count
from paceline.lab.patches import build_measurement_patch
from paceline.lab.repeat import alternate_order, run_interleaved
from paceline.lab.runner import ReusePolicy, TrialError, TrialRunner, interrupt_on_signals
from paceline.lab.sweep import Sweep, build_sweep, build_sweep_points, summarize_sweep
from paceline.lab.trial import TrialOutcome, apply_patch, build_run_name, write_recipe
from paceline.recipe.consent import require_consent
from paceline.recipe.load import LoadedRecipe, load
from paceline.recipe.plan import resolve_batch
from paceline.recipe.schema import Recipe


@dataclass(frozen=True)
class _SweepRequest:
    """Request; `recipe` is `loaded` with the settings of a measurement."""

    loaded: LoadedRecipe
    recipe: Recipe
    sweep: Sweep
    ranks: int
    options: ProfileOptions

    @property
    def key_values(self) -> dict[str, Any]:
        """All that the runs depend on."""
        values = [trial.name for trial in self.sweep.trials]
        length = {"ranks": self.ranks, "steps": self.options.steps, "repeats": self.options.repeats}
        return {"verb": "profile --vary", "recipe": self.recipe.to_dict(), "values": values, **length}


def sweep(options: ProfileOptions) -> int:
    """Run `paceline profile --vary`, and return the exit code."""
    if options.trace or options.nvtx:
        given = "trace" if options.trace else "nvtx"
        raise RecipeError(f"--{given}: slows down the runs that --vary compares (leave one out)")
    name, overrides = split_recipe_args(options.args)
    refuse_length(overrides, "a profile", purpose="profile")
    refuse_launcher("profile --vary")
    loaded = load(name, overrides)
    require_consent(loaded, own_code=options.own_code)
    if loaded.recipe.measure.trace != "off" or loaded.recipe.measure.nvtx != "off":
        raise RecipeError("--vary: compares speeds, which traces and NVTX ranges change (leave measure.* out)")
    num_ranks = count_ranks(options.ranks, os.environ)
    refuse_too_many(num_ranks, loaded.recipe.parallel.device, oversubscribe=options.oversubscribe)
    loaded = replace(loaded, recipe=resolve_batch(loaded.recipe, num_ranks))
    recipe = apply_patch(loaded.recipe, build_measurement_patch(loaded.recipe, options.steps, overrides))
    values = build_sweep(options.vary, recipe, num_ranks, options.repeats)
    request = _SweepRequest(loaded, recipe, values, num_ranks, options)
    as_json = options.as_json
    with locked_experiment(
        f"profile-vary-{loaded.name}", request.key_values, options.run_dir, as_json=as_json
    ) as folder:
        result = read_finished(folder, SweepResult) or _run_sweep(request, folder, as_json=as_json)
    show_experiment(result, folder, as_json=as_json)
    return 0


def _run_sweep(request: _SweepRequest, folder: ExperimentDir, *, as_json: bool) -> SweepResult:
    trials, outcomes = request.sweep.trials, []
    write_recipe(request.loaded.recipe, folder.recipe)
    write_recipe(request.recipe, folder.measured)
    total = len(trials) * request.options.repeats
    with (
        interrupt_on_signals(*STOP_SIGNALS),
        progress_output(progress_console(as_json=as_json), total) as (on_start, print_line),
    ):
        print_line(
            f"{count(total, 'run')} of {count(request.recipe.measure.warmup_steps + request.options.steps, 'step')}"
        )

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
        for outcome in run_interleaved(lambda repeat: alternate_order(trials, repeat), request.options.repeats, runner):
            print_line(_outcome_line(outcome, request.options.repeats))
            outcomes.append(outcome)
    result = _build_result(request, outcomes)
    finish_experiment(folder, result)
    return result


def _outcome_line(outcome: TrialOutcome, repeats: int) -> str:
    name = outcome.trial.name + (f", repeat {outcome.repeat}" if repeats > 1 else "")
    if outcome.result is None:
        return f"{name}: failed: {outcome.error}"
    return f"{name}: {outcome.result.throughput.images_per_s:,.0f} images/s"


def _build_result(request: _SweepRequest, outcomes: Sequence[TrialOutcome]) -> SweepResult:
    results = [outcome.result for outcome in outcomes if outcome.result is not None]
    if not results:
        raise TrialError(outcomes[0].error, outcomes[0].exit_code)
    points = build_sweep_points(request.sweep.trials, outcomes)
    fastest, sentence = summarize_sweep(points)
    return SweepResult(
        key=request.sweep.key,
        recipe=request.loaded.name,
        recipe_hash=request.loaded.recipe.hash,
        ranks=request.ranks,
        steps=request.options.steps,
        warmup_steps=request.recipe.measure.warmup_steps,
        repeats=request.options.repeats,
        points=points,
        fastest=fastest,
        sentence=sentence,
        wall_s=sum(result.time.wall_s for result in results),
        command=("paceline", *sys.argv[1:]),
        provenance=results[0].provenance,
    )
