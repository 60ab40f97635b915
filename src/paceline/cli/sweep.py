"""`paceline profile --vary`: a short profile for each value of a setting, and the fastest value.

A sweep's folder holds one run directory per run. The same command resumes it.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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
from paceline.cli.show_sweep import show_sweep
from paceline.cli.telling import telling
from paceline.cli.words import count_ranks, refuse_length, split_words
from paceline.core.console import progress_console
from paceline.core.errors import RecipeError
from paceline.core.experiments.folder import ExperimentDir
from paceline.core.experiments.sweep import SweepResult
from paceline.core.units import count
from paceline.lab.earlier import Earlier
from paceline.lab.measuring import measuring_patch
from paceline.lab.runner import Runner, TrialError, interrupted_by
from paceline.lab.sweep import Sweep, build_sweep, conclusion, to_points
from paceline.lab.trial import Outcome, folder_name, vary, write_recipe
from paceline.lab.turns import run_turns, there_and_back
from paceline.recipe.consent import require_consent
from paceline.recipe.load import Loaded, load
from paceline.recipe.plan import resolve_batch
from paceline.recipe.schema import Recipe


@dataclass(frozen=True)
class _Asked:
    """Request: `recipe` is the measured form of `loaded`."""

    loaded: Loaded
    recipe: Recipe
    sweep: Sweep
    ranks: int
    steps: int
    repeats: int
    oversubscribe: bool

    @property
    def plain(self) -> dict[str, Any]:
        """Everything that the runs depend on, as plain values."""
        values = [trial.name for trial in self.sweep.trials]
        length = {"ranks": self.ranks, "steps": self.steps, "repeats": self.repeats}
        return {"verb": "profile --vary", "recipe": self.recipe.to_dict(), "values": values, **length}


def sweep(
    args: list[str],
    ranks: str,
    run_dir: Path | None,
    *,
    varied: Sequence[str],
    steps: int,
    repeats: int,
    own_code: bool,
    oversubscribe: bool,
    as_json: bool,
) -> int:
    """Run `paceline profile --vary`, and return the exit code."""
    name, overrides = split_words(args)
    refuse_length(overrides, "a profile", to="profile")
    refuse_ranks_of_others("profile --vary")
    loaded = load(name, overrides)
    require_consent(loaded, own_code=own_code)
    if loaded.recipe.measure.trace != "off" or loaded.recipe.measure.nvtx != "off":
        raise RecipeError("--vary: compares speeds, which traces and NVTX ranges change (leave measure.* out)")
    num_ranks = count_ranks(ranks, os.environ)
    refuse_too_many(num_ranks, loaded.recipe.parallel.device, oversubscribe=oversubscribe)
    loaded = replace(loaded, recipe=resolve_batch(loaded.recipe, num_ranks))
    recipe = vary(loaded.recipe, measuring_patch(loaded.recipe, steps, overrides))
    values = build_sweep(varied, recipe, num_ranks, repeats)
    request = _Asked(loaded, recipe, values, num_ranks, steps, repeats, oversubscribe)
    with experiment(f"profile-vary-{loaded.name}", request.plain, run_dir, as_json=as_json) as folder:
        result = found_before(folder, SweepResult) or _measure(request, folder, as_json=as_json)
    show_sweep(result, folder, as_json=as_json)
    return 0


def _measure(request: _Asked, folder: ExperimentDir, *, as_json: bool) -> SweepResult:
    """Run all values in alternating order, and write the result."""
    trials, outcomes = request.sweep.trials, []
    write_recipe(request.loaded.recipe, folder.recipe)
    write_recipe(request.recipe, folder.measured)
    total = len(trials) * request.repeats
    with interrupted_by(*STOPS), telling(progress_console(as_json=as_json), total) as (on_start, print_line):
        print_line(f"{count(total, 'run')} of {count(request.recipe.measure.warmup_steps + request.steps, 'step')}")

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
        for outcome in run_turns(lambda turn: there_and_back(trials, turn), request.repeats, runner):
            print_line(_line(outcome, request.repeats))
            outcomes.append(outcome)
    result = _result(request, outcomes)
    leave(folder, result)
    return result


def _line(outcome: Outcome, repeats: int) -> str:
    name = outcome.trial.name + (f", repeat {outcome.repeat}" if repeats > 1 else "")
    if outcome.result is None:
        return f"{name}: failed: {outcome.error}"
    return f"{name}: {outcome.result.throughput.images_per_s:,.0f} images/s"


def _result(request: _Asked, outcomes: Sequence[Outcome]) -> SweepResult:
    """Build the result. Raise `TrialError` if every run failed."""
    results = [outcome.result for outcome in outcomes if outcome.result is not None]
    if not results:
        raise TrialError(outcomes[0].error, outcomes[0].code)
    points = to_points(request.sweep.trials, outcomes)
    fastest, sentence = conclusion(points)
    return SweepResult(
        key=request.sweep.key,
        recipe=request.loaded.name,
        recipe_hash=request.loaded.recipe.hash,
        ranks=request.ranks,
        steps=request.steps,
        warmup_steps=request.recipe.measure.warmup_steps,
        repeats=request.repeats,
        points=points,
        fastest=fastest,
        sentence=sentence,
        wall_s=sum(result.time.wall_s for result in results),
        command=("paceline", *sys.argv[1:]),
        provenance=results[0].provenance,
    )
