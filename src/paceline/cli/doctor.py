"""`paceline doctor`: check this machine or allocation, and recommend a checkpoint interval."""

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.advice import Costs, advise, close_to
from paceline.cli.ranks import enter_world, refuse_too_many, start_ranks
from paceline.cli.show import goodput_line, print_rows, saving_line
from paceline.cli.show_doctor import rows_of, verdict
from paceline.cli.started import STARTED_S
from paceline.cli.words import count_ranks, split_words
from paceline.core.errors import PacelineError, RecipeError, WorldError
from paceline.core.results import CheckpointResult
from paceline.core.rundir import RunDir, is_run
from paceline.core.units import Duration, count
from paceline.core.world import World
from paceline.lab.doctor.finding import Finding, is_any_wrong, worst
from paceline.lab.doctor.here import Here
from paceline.lab.doctor.machine import machine_findings
from paceline.recipe.consent import require_consent
from paceline.recipe.load import load
from paceline.recipe.schema import Recipe

if TYPE_CHECKING:
    from paceline.cli.upkeep import Upkeep
    from paceline.core.dataset import Datasets

    Data = Callable[[], Datasets]

WRONG = 1
"""Exit code if a run would fail."""


@dataclass(frozen=True)
class Part:
    """Section of the output: its key in JSON, title, values and rows."""

    key: str
    title: str
    values: Any
    rows: list[tuple[str, ...]]


def doctor(
    args: list[str],
    mtbf: str | None,
    *,
    as_json: bool,
    ranks: str | None = None,
    run_dir: Path | None = None,
    oversubscribe: bool = False,
    port: int = 0,
    own_code: bool = False,
) -> int:
    """Run `paceline doctor`, and return the exit code.

    `ranks` is the number of ranks to start here to check communication; ranks of a launcher are checked in any case.
    `run_dir` is the directory a run would write to.
    """
    mtbf_s = _seconds(mtbf) if mtbf else None
    run = _run(args)
    loaded = load(*split_words(args)) if args or mtbf_s is not None else None
    if loaded:
        require_consent(loaded, own_code=own_code)
    recipe = loaded.recipe if loaded else None
    environ = dict(os.environ)  # as given, before this process changes it
    world = _entered()
    to_start = _ranks_to_start(ranks, world, environ)
    refuse_too_many(to_start, recipe.parallel.device if recipe else "auto", oversubscribe=oversubscribe)
    if to_start > 1:
        return start_ranks(to_start, port, [])
    folder = run_dir.expanduser() if run_dir else run.path if run else Path("runs")
    host = Here(environ, folder, time.perf_counter, time.time())
    data = cache(lambda: _data_of(recipe))  # once: opening data can be slow on a network disk
    machine = [*machine_findings(host), *_needs(recipe, world, data)]
    shared = _between(world, machine, recipe) if world.world_size > 1 else ()
    if shared is None:
        return 0
    findings = [*machine, *shared]
    parts = [_part("machine", "this machine", machine)]
    parts += [_part("ranks", "the ranks", shared)] if shared else []
    if recipe is not None:
        parts += _of_run(recipe, run, data, mtbf_s) if run else _of_recipe(recipe, data, mtbf_s)
    _tell(parts, findings, as_json=as_json)
    return WRONG if is_any_wrong(findings) else 0


def _entered() -> World:
    """Return this process's world, or a single process if variables contradict each other (which is a finding)."""
    try:
        return enter_world()
    except WorldError:
        return World.single()


def _ranks_to_start(text: str | None, world: World, environ: Mapping[str, str]) -> int:
    """Return the number of ranks to start here, 1 if none are needed."""
    if text is None or (world.launcher != "single" and text in ("auto", str(world.world_size))):
        return 1
    if world.launcher != "single":
        started = f"{count(world.world_size, 'rank')} were started by {world.launcher}"
        raise WorldError(f"--ranks: {text}, but {started} (leave --ranks out)")
    return count_ranks(text, environ)


def _data_of(recipe: Recipe | None) -> "Datasets":
    """Return the data of a recipe, without downloading it."""
    from paceline.data.sources.build import build_datasets

    assert recipe is not None, "called with a recipe only"
    return build_datasets(recipe.data.source, may_download=False, skip_bad=recipe.data.on_bad_image == "skip")


def _needs(recipe: Recipe | None, world: World, data: "Data") -> list[Finding]:
    """Return a finding on whether this machine has what the recipe needs; none without a recipe."""
    if recipe is None:
        return []
    from paceline.lab.doctor.needs import recipe_finding

    return [recipe_finding(recipe, world, data)]


def _between(world: World, machine: Sequence[Finding], recipe: Recipe | None) -> tuple[Finding, ...] | None:
    """Return the findings of all ranks on rank 0, None on the others."""
    # NCCL then raises an error if ranks do not answer; otherwise it would end the process, findings included.
    # https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
    from paceline.lab.doctor.ranks import between

    return between(world, machine, os.environ, section=recipe.parallel if recipe else None)


def _part(key: str, title: str, findings: Sequence[Finding]) -> Part:
    return Part(key, title, [finding.to_dict() for finding in findings], rows_of(findings))


def _tell(parts: Sequence[Part], findings: Sequence[Finding], *, as_json: bool) -> None:
    if as_json:
        values = {"state": worst(findings), **{section.key: section.values for section in parts}}
        print(json.dumps(values, indent=2))
        return
    for section in parts:
        print_rows(section.rows, section.title)
    print(verdict(findings))


def _seconds(text: str) -> float:
    try:
        duration = Duration.parse(text)
    except ValueError as error:
        raise RecipeError(f"--mtbf: {error}") from None
    if not duration.is_time or duration.seconds <= 0:
        raise RecipeError(f"--mtbf: '{duration}' is not a wall-clock time (write 8h or 30min)")
    return duration.seconds


def _run(args: list[str]) -> RunDir | None:
    """Return the run directory that the arguments begin with, or None."""
    folder = Path(args[0]).expanduser() if args and "=" not in args[0] else None
    return RunDir(folder) if folder and is_run(folder) else None


def _of_recipe(recipe: Recipe, data: "Data", mtbf_s: float | None) -> list[Part]:
    """Return the cost of checkpoints and the advised interval, with the import time as restart time."""
    saving, section = _measured(recipe, data, Path())
    if saving is None:
        return [section]
    every_s = (
        recipe.checkpoint.every.seconds
        if recipe.checkpoint.every != "off" and recipe.checkpoint.every.is_time
        else None
    )
    restart_s = time.perf_counter() - STARTED_S
    assumed = (
        f"{restart_s:.1f} s, assumed: the start-up of this command; joining ranks, data and the first step come on top"
    )
    section.rows.append(("restart", assumed))
    section.values["restart_s"] = restart_s
    return [section, *_advice(Costs(saving.stall_s, saving.write_s, restart_s, None, every_s), mtbf_s)]


def _of_run(recipe: Recipe, run: RunDir, data: "Data", mtbf_s: float | None) -> list[Part]:
    """Return a run's history, the cost of checkpoints, and the advised interval."""
    from paceline.cli.upkeep import read_upkeep

    upkeep = read_upkeep(run, recipe.checkpoint)
    parts = [_seen(run, upkeep)]
    if upkeep.saving is not None:
        saving: CheckpointResult | None = upkeep.saving
        parts.append(
            Part("saving", "saving, as measured by the run", upkeep.saving.model_dump(), [_saved(upkeep.saving)])
        )
    else:
        saving, section = _measured(recipe, data, run.path)
        parts.append(section)
    if saving is None:
        return parts
    step_s = upkeep.step_s[0] if upkeep.step_s else None
    slow_s = upkeep.step_s[1] if upkeep.step_s else None
    costs = Costs(saving.stall_s, saving.write_s, upkeep.restart_s, step_s, upkeep.every_s, slow_s)
    if mtbf_s is None and upkeep.failures:
        mtbf_s = upkeep.mtbf.mean_s
    return [*parts, *_advice(costs, mtbf_s)]


def _advice(costs: Costs, mtbf_s: float | None) -> list[Part]:
    """Return the advised checkpoint interval; a hint if the MTBF is unknown."""
    if mtbf_s is None:
        hint = ("how often to save", "add --mtbf, such as --mtbf 8h: the mean time between failures")
        return [Part("advice", "how often to save", {}, [hint])]
    values, rows = advise(costs, mtbf_s)
    return [Part("advice", "how often to save", values, rows)]


def _measured(recipe: Recipe, data: "Data", folder: Path) -> tuple[CheckpointResult | None, Part]:
    """Measure saving the recipe's state in `folder`; None and the reason if that fails."""
    from paceline.train.save_trial import try_saving

    try:
        saving = try_saving(recipe, folder, data())
    except PacelineError as error:
        return None, Part("saving", "saving", {"error": str(error)}, [("not measured", str(error))])
    title = f"saving, measured now on one rank at {folder.absolute()}"
    return saving, Part("saving", title, saving.model_dump(), [_saved(saving)])


def _saved(saving: CheckpointResult) -> tuple[str, ...]:
    return "checkpoints", saving_line(saving)


def _seen(run: RunDir, upkeep: "Upkeep") -> Part:
    """Return the history of the run so far."""
    rows: list[tuple[str, ...]] = []
    if upkeep.step_s:
        median_s, slow_s = upkeep.step_s
        rows.append(("step", f"{1000 * median_s:.1f} ms, the 99th percentile {1000 * slow_s:.1f} ms"))
    if upkeep.goodput is not None:
        rows.append(("goodput", goodput_line(upkeep.goodput)))
    what = "from a failure to the first new step" if upkeep.restarts else "to start; detection and queueing come on top"
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
        return f"none in {up}, so at least {close_to(mtbf.low_s)} apart (95 % confidence)"
    apart = f"one in {close_to(mtbf.mean_s)} ({close_to(mtbf.low_s)} to {close_to(mtbf.high_s)}, 95 % confidence)"
    return f"{upkeep.failures:,} in {up}: {apart}"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
