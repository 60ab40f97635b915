"""Measure the first seconds of a run in new processes: the time of the whole run, its memory and its checkpoints."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from paceline.core.errors import PacelineError
from paceline.core.json_file import read_json
from paceline.core.results import EstimateResult, RunResult
from paceline.core.units import count, duration, seconds, share, size
from paceline.lab.doctor.check import DoctorFinding, Outcome, failure, failure_by, ok, warning
from paceline.lab.patches import drop_unchanged_settings
from paceline.lab.runner import TrialRunner
from paceline.lab.trial import Trial, TrialOutcome, apply_patch, write_recipe
from paceline.recipe.schema import Recipe
from paceline.training.preflight import temporary_folder

_LONGER: Final = 4
"""Factor by which a run is repeated that made no two steps in its time."""
_FULL: Final = 0.85
"""Share of the memory or the disk above which there is little room left."""


@dataclass(frozen=True)
class RunCheck:
    """Outcome of the first seconds of a run, the most bytes of its checkpoints, and those free on the disk.

    `unfreeze_step` is that of the plan.
    """

    outcome: TrialOutcome
    disk_bytes: int = 0
    free_bytes: int = 0
    unfreeze_step: int = 0

    @property
    def result(self) -> RunResult | None:
        """The result, None if the run failed."""
        return self.outcome.result

    @property
    def estimate(self) -> EstimateResult | None:
        """The estimate of the whole run; None if it failed, was too slow, or was complete in its time."""
        return self.result.forecast if self.result else None


def measure_run(recipe: Recipe, ranks: int, folder: Path, run_s: float, *, oversubscribe: bool = False) -> RunCheck:
    """Train `recipe` on `ranks` ranks for about `run_s` seconds, start-up included, in a temporary folder in `folder`.

    It ends with an evaluation and a checkpoint. A run of fewer than two steps is repeated with four times as much time.
    Raise `RecipeError` if the folder cannot be written.
    """
    settings = [("log.report", "off"), ("log.quote", "off"), ("log.sinks", []), ("train.callbacks", [])]
    settings += [("train.stop", "off"), ("train.patience", "off")]
    existing = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.is_dir())
    for length_s in (run_s, _LONGER * run_s):
        limit = ("train.max_time", f"{length_s:g}s")
        short = apply_patch(recipe, drop_unchanged_settings(recipe, [*settings, limit]))
        with temporary_folder(existing) as below:
            path, run = below / "recipe.yaml", below / "run"
            write_recipe(short, path)
            runner = TrialRunner(
                short, path, ranks, partial(_ignore_trial, run), needs_speed=False, oversubscribe=oversubscribe
            )
            outcome = runner.run(Trial("check"), 1)
            if outcome.result is None:
                return RunCheck(outcome)
            plan = read_json(run / "plan.json")
            free_bytes = shutil.disk_usage(below).free
            check = RunCheck(outcome, plan["disk_bytes"], free_bytes, plan["unfreeze_step"])
        if check.estimate is not None or outcome.result.status != "time_reached":
            break
    return check


def _ignore_trial(run: Path, trial: Trial, repeat: int) -> Path:
    return run


def check_run(check: RunCheck) -> Iterator[DoctorFinding]:
    """Yield findings on the time of the run, its memory and its disk space."""
    result, estimate = check.result, check.estimate
    if result is None:
        yield DoctorFinding("run", *failure_by(PacelineError(check.outcome.error)))
        return
    yield DoctorFinding("time", *_describe_time(result, estimate))
    if estimate is not None and estimate.memory_total_bytes:
        used = f"peak {size(estimate.memory_bytes)} of {size(estimate.memory_total_bytes)}"
        if estimate.memory_bytes > _FULL * estimate.memory_total_bytes:
            advice = "lower data.batch_size, or raise train.accumulate, or use fewer workers: little room is left"
            yield DoctorFinding("memory", *warning(used, advice))
        elif check.unfreeze_step > result.steps:
            advice = "train.accumulate=auto measures those steps, or check with model.unfreeze=1st"
            more = f"before step {check.unfreeze_step:,}, which trains more parameters and needs more"
            yield DoctorFinding("memory", *warning(f"{used} {more}", advice))
        else:
            yield DoctorFinding("memory", *ok(f"{used}, fits"))
    yield DoctorFinding("disk", *_describe_disk(check, result))


def _describe_time(result: RunResult, estimate: EstimateResult | None) -> Outcome:
    startup_s = result.time.startup_s
    if estimate is None:
        if result.status == "time_reached":
            return warning("not known: fewer than two steps were made", "give it more time by --seconds")
        return ok(f"{seconds(result.time.wall_s)}: the whole run was complete in the time of the check")
    forecast = estimate.forecast
    total, low, high = (duration(startup_s + each) for each in (forecast.predicted_s, forecast.low_s, forecast.high_s))
    parts = [
        f"start-up {seconds(startup_s)}",
        f"{count(forecast.steps, 'step')} of {seconds(forecast.step_s)}",
        *([f"{count(forecast.evaluations, 'evaluation')} of {seconds(forecast.eval_s)}"] * bool(forecast.evaluations)),
        *([f"{count(forecast.checkpoints, 'checkpoint')} of {seconds(forecast.checkpoint_s)}"]
          * bool(forecast.checkpoints)),
    ]  # fmt: skip
    return ok(f"about {total} ({low} to {high}): {', '.join(parts)}; {count(result.world_size, 'rank')}")


def _describe_disk(check: RunCheck, result: RunResult) -> Outcome:
    saving = result.checkpoints
    if not check.disk_bytes or saving is None:
        return ok(f"no checkpoints; {size(check.free_bytes)} free")
    text = f"up to {size(check.disk_bytes)} of checkpoints of {size(saving.bytes)} each, {size(check.free_bytes)} free"
    if check.disk_bytes > check.free_bytes:
        return failure(text, "free some space, name another --run-dir, or lower checkpoint.keep")
    if check.disk_bytes > _FULL * check.free_bytes:
        return warning(
            f"{text}: {share(check.disk_bytes / check.free_bytes)}", "free some space, or lower checkpoint.keep"
        )
    return ok(text)
