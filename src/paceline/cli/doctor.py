"""`paceline doctor`: what this machine is like for a run, what saving takes here, and how often it pays."""

import json
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.advice import Costs, advise, close_to
from paceline.cli.checks import machine_checks
from paceline.cli.show import goodput_line, print_rows, saving_line
from paceline.cli.started import STARTED_S
from paceline.cli.words import split_words
from paceline.core.errors import PacelineError, RecipeError
from paceline.core.results import CheckpointResult
from paceline.core.rundir import RunDir
from paceline.core.units import Duration
from paceline.recipe.load import RUN_RECIPE, load
from paceline.recipe.schema import Recipe

if TYPE_CHECKING:
    from paceline.cli.upkeep import Upkeep


@dataclass(frozen=True)
class Part:
    """A part of the report: its name in JSON and on the screen, its values and its rows."""

    key: str
    title: str
    values: Any
    rows: list[tuple[str, ...]]


def doctor(words: list[str], mtbf: str | None, *, as_json: bool) -> int:
    """Do what `paceline doctor` was asked for; return the exit code."""
    mtbf_s = _seconds(mtbf) if mtbf else None
    run = _run(words)
    parts = [_machine(run.path if run else Path("runs"))]
    if words or mtbf_s is not None:
        recipe = load(*split_words(words)).recipe
        parts += _of_run(recipe, run, mtbf_s) if run else _of_recipe(recipe, mtbf_s)
    if as_json:
        print(json.dumps({part.key: part.values for part in parts}, indent=2))
        return 0
    for part in parts:
        print_rows(part.rows, part.title)
    return 0


def _seconds(text: str) -> float:
    try:
        found = Duration.parse(text)
    except ValueError as error:
        raise RecipeError(f"--mtbf: {error}") from None
    if not found.is_time or found.seconds <= 0:
        raise RecipeError(f"--mtbf: '{found}' is not a wall-clock time (write 8h or 30min)")
    return found.seconds


def _run(words: list[str]) -> RunDir | None:
    """Return the run directory that the words begin with, or None."""
    folder = Path(words[0]).expanduser() if words and "=" not in words[0] else None
    return RunDir(folder) if folder and (folder / RUN_RECIPE).is_file() else None


def _machine(folder: Path) -> Part:
    checks = list(machine_checks(os.environ, folder))
    rows: list[tuple[str, ...]] = [
        (check.name, "ok" if check.is_ok else "look", "\n".join(filter(None, (check.found, check.advice))))
        for check in checks
    ]
    return Part("machine", "this machine", [check.to_dict() for check in checks], rows)


def _of_recipe(recipe: Recipe, mtbf_s: float | None) -> list[Part]:
    """Return what saving would take, and how often it would pay; a start is taken to be as long as the imports."""
    saving, part = _measured(recipe, Path())
    if saving is None:
        return [part]
    every_s = (
        recipe.checkpoint.every.seconds
        if recipe.checkpoint.every != "off" and recipe.checkpoint.every.is_time
        else None
    )
    restart_s = time.perf_counter() - STARTED_S
    assumed = (
        f"{restart_s:.1f} s, assumed: what it took to get here; joining ranks, data and the first step come on top"
    )
    part.rows.append(("restart", assumed))
    part.values["restart_s"] = restart_s
    return [part, *_advice(Costs(saving.stall_s, saving.write_s, restart_s, None, every_s), mtbf_s)]


def _of_run(recipe: Recipe, run: RunDir, mtbf_s: float | None) -> list[Part]:
    """Return what a run has seen, what saving takes, and how often it would pay."""
    from paceline.cli.upkeep import read_upkeep

    upkeep = read_upkeep(run, recipe.checkpoint)
    parts = [_seen(run, upkeep)]
    if upkeep.saving is not None:
        saving: CheckpointResult | None = upkeep.saving
        parts.append(Part("saving", "saving, as the run found it", upkeep.saving.model_dump(), [_saved(upkeep.saving)]))
    else:
        saving, part = _measured(recipe, run.path)
        parts.append(part)
    if saving is None:
        return parts
    step_s = upkeep.step_s[0] if upkeep.step_s else None
    slow_s = upkeep.step_s[1] if upkeep.step_s else None
    costs = Costs(saving.stall_s, saving.write_s, upkeep.restart_s, step_s, upkeep.every_s, slow_s)
    if mtbf_s is None and upkeep.failures:
        mtbf_s = upkeep.mtbf.mean_s
    return [*parts, *_advice(costs, mtbf_s)]


def _advice(costs: Costs, mtbf_s: float | None) -> list[Part]:
    """Return how often to save; nothing where nobody says how often things fail."""
    if mtbf_s is None:
        hint = ("how often to save", "add --mtbf, such as --mtbf 8h: the mean time between failures")
        return [Part("advice", "how often to save", {}, [hint])]
    values, rows = advise(costs, mtbf_s)
    return [Part("advice", "how often to save", values, rows)]


def _measured(recipe: Recipe, folder: Path) -> tuple[CheckpointResult | None, Part]:
    """Return what saving the recipe's state in `folder` takes, measured now, or None and why not."""
    from paceline.train.save_trial import try_saving

    try:
        saving = try_saving(recipe, folder)
    except PacelineError as error:
        return None, Part("saving", "saving", {"error": str(error)}, [("not measured", str(error))])
    title = f"saving, measured now on one rank at {folder.absolute()}"
    return saving, Part("saving", title, saving.model_dump(), [_saved(saving)])


def _saved(saving: CheckpointResult) -> tuple[str, ...]:
    return "checkpoints", saving_line(saving)


def _seen(run: RunDir, upkeep: "Upkeep") -> Part:
    """Return what happened in the run so far."""
    rows: list[tuple[str, ...]] = []
    if upkeep.step_s:
        median_s, slow_s = upkeep.step_s
        rows.append(("step", f"{1000 * median_s:.1f} ms, one in a hundred takes {1000 * slow_s:.1f} ms or more"))
    if upkeep.goodput is not None:
        rows.append(("goodput", goodput_line(upkeep.goodput)))
    what = "from a failure to the first new step" if upkeep.restarts else "to start; noticing and queueing come on top"
    rows.append(("restart", f"{upkeep.restart_s:.1f} s {what}"))
    rows.append(("failures", _failures(upkeep)))
    if upkeep.at_risk_s:
        rows.append(("at risk", f"{close_to(upkeep.at_risk_s)} of training since the newest checkpoint"))
    mtbf = upkeep.mtbf
    values = {
        "step_s": upkeep.step_s,
        "goodput": upkeep.goodput.model_dump() if upkeep.goodput else None,
        "restart_s": upkeep.restart_s,
        "restarts": upkeep.restarts,
        "failures": upkeep.failures,
        "up_s": upkeep.up_s,
        "mtbf_s": {name: _finite(getattr(mtbf, f"{name}_s")) for name in ("mean", "low", "high")},
        "at_risk_s": upkeep.at_risk_s,
    }
    return Part("run", run.path.name, values, rows)


def _failures(upkeep: "Upkeep") -> str:
    mtbf, up = upkeep.mtbf, close_to(upkeep.up_s)
    if not upkeep.failures:
        return f"none in {up}, so they are at least {close_to(mtbf.low_s)} apart (95 % sure)"
    apart = f"one in {close_to(mtbf.mean_s)} ({close_to(mtbf.low_s)} to {close_to(mtbf.high_s)}, 95 % sure)"
    return f"{upkeep.failures:,} in {up}: {apart}"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
