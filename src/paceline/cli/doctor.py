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

from paceline.cli.advice import SavingCosts, advise_interval, approximate_time
from paceline.cli.ranks import enter_world, refuse_too_many, start_ranks
from paceline.cli.show import goodput_line, print_rows, saving_line
from paceline.cli.show_doctor import finding_rows, summarize_findings
from paceline.cli.started import START_TIME_S
from paceline.cli.words import count_ranks, split_recipe_args
from paceline.core.errors import PacelineError, RecipeError, WorldError
from paceline.core.results import CheckpointResult
from paceline.core.rundir import RunDir, is_run
from paceline.core.units import Duration, count
from paceline.core.world import World
from paceline.lab.doctor.finding import DoctorFinding, find_worst_state, has_problem
from paceline.lab.doctor.here import HostContext
from paceline.lab.doctor.machine import check_host
from paceline.recipe.consent import require_consent
from paceline.recipe.load import load
from paceline.recipe.schema import Recipe

if TYPE_CHECKING:
    from paceline.cli.upkeep import RunHistory
    from paceline.core.dataset import Datasets

    Data = Callable[[], Datasets]

FAILED_CODE = 1
"""Exit code if a run would fail."""


@dataclass(frozen=True)
class DoctorSection:
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
    mtbf_s = _parse_mtbf(mtbf) if mtbf else None
    run = _find_run(args)
    loaded = load(*split_recipe_args(args)) if args or mtbf_s is not None else None
    if loaded:
        require_consent(loaded, own_code=own_code)
    recipe = loaded.recipe if loaded else None
    environ = dict(os.environ)  # as given, before this process changes it
    world = _enter_world()
    to_start = _ranks_to_start(ranks, world, environ)
    refuse_too_many(to_start, recipe.parallel.device if recipe else "auto", oversubscribe=oversubscribe)
    if to_start > 1:
        return start_ranks(to_start, port, [])
    folder = run_dir.expanduser() if run_dir else run.path if run else Path("runs")
    host = HostContext(environ, folder, time.perf_counter, time.time())
    data = cache(lambda: _build_datasets(recipe))  # once: opening data can be slow on a network disk
    machine = [*check_host(host), *_check_recipe(recipe, world, data)]
    shared = _check_ranks(world, machine, recipe) if world.world_size > 1 else ()
    if shared is None:
        return 0
    findings = [*machine, *shared]
    parts = [_findings_section("machine", "this machine", machine)]
    parts += [_findings_section("ranks", "the ranks", shared)] if shared else []
    if recipe is not None:
        parts += _run_sections(recipe, run, data, mtbf_s) if run else _recipe_sections(recipe, data, mtbf_s)
    _print_sections(parts, findings, as_json=as_json)
    return FAILED_CODE if has_problem(findings) else 0


def _enter_world() -> World:
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


def _build_datasets(recipe: Recipe | None) -> "Datasets":
    """Return the data of a recipe, without downloading it."""
    from paceline.data.sources.build import build_datasets

    assert recipe is not None, "called with a recipe only"
    return build_datasets(recipe.data.source, may_download=False, skip_bad=recipe.data.on_bad_image == "skip")


def _check_recipe(recipe: Recipe | None, world: World, data: "Data") -> list[DoctorFinding]:
    """Return a finding on whether this machine has what the recipe needs; none without a recipe."""
    if recipe is None:
        return []
    from paceline.lab.doctor.needs import check_recipe

    return [check_recipe(recipe, world, data)]


def _check_ranks(
    world: World, machine: Sequence[DoctorFinding], recipe: Recipe | None
) -> tuple[DoctorFinding, ...] | None:
    """Return the findings of all ranks on rank 0, None on the others."""
    # NCCL then raises an error if ranks do not answer; otherwise it would end the process, findings included.
    # https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
    from paceline.lab.doctor.ranks import check_ranks

    return check_ranks(world, machine, os.environ, section=recipe.parallel if recipe else None)


def _findings_section(key: str, title: str, findings: Sequence[DoctorFinding]) -> DoctorSection:
    return DoctorSection(key, title, [finding.to_dict() for finding in findings], finding_rows(findings))


def _print_sections(parts: Sequence[DoctorSection], findings: Sequence[DoctorFinding], *, as_json: bool) -> None:
    if as_json:
        values = {"state": find_worst_state(findings), **{section.key: section.values for section in parts}}
        print(json.dumps(values, indent=2))
        return
    for section in parts:
        print_rows(section.rows, section.title)
    print(summarize_findings(findings))


def _parse_mtbf(text: str) -> float:
    try:
        duration = Duration.parse(text)
    except ValueError as error:
        raise RecipeError(f"--mtbf: {error}") from None
    if not duration.is_time or duration.seconds <= 0:
        raise RecipeError(f"--mtbf: '{duration}' is not a wall-clock time (write 8h or 30min)")
    return duration.seconds


def _find_run(args: list[str]) -> RunDir | None:
    """Return the run directory that the arguments begin with, or None."""
    folder = Path(args[0]).expanduser() if args and "=" not in args[0] else None
    return RunDir(folder) if folder and is_run(folder) else None


def _recipe_sections(recipe: Recipe, data: "Data", mtbf_s: float | None) -> list[DoctorSection]:
    """Return the cost of checkpoints and the advised interval, with the import time as restart time."""
    saving, section = _measure_saving(recipe, data, Path())
    if saving is None:
        return [section]
    every_s = (
        recipe.checkpoint.every.seconds
        if recipe.checkpoint.every != "off" and recipe.checkpoint.every.is_time
        else None
    )
    restart_s = time.perf_counter() - START_TIME_S
    assumed = (
        f"{restart_s:.1f} s, assumed: the start-up of this command; joining ranks, data and the first step come on top"
    )
    section.rows.append(("restart", assumed))
    section.values["restart_s"] = restart_s
    return [section, *_advice_section(SavingCosts(saving.stall_s, saving.write_s, restart_s, None, every_s), mtbf_s)]


def _run_sections(recipe: Recipe, run: RunDir, data: "Data", mtbf_s: float | None) -> list[DoctorSection]:
    """Return a run's history, the cost of checkpoints, and the advised interval."""
    from paceline.cli.upkeep import read_run_history

    upkeep = read_run_history(run, recipe.checkpoint)
    parts = [_history_section(run, upkeep)]
    if upkeep.saving is not None:
        saving: CheckpointResult | None = upkeep.saving
        parts.append(
            DoctorSection(
                "saving", "saving, as measured by the run", upkeep.saving.model_dump(), [_saving_row(upkeep.saving)]
            )
        )
    else:
        saving, section = _measure_saving(recipe, data, run.path)
        parts.append(section)
    if saving is None:
        return parts
    step_s = upkeep.step_s[0] if upkeep.step_s else None
    slow_s = upkeep.step_s[1] if upkeep.step_s else None
    costs = SavingCosts(saving.stall_s, saving.write_s, upkeep.restart_s, step_s, upkeep.every_s, slow_s)
    if mtbf_s is None and upkeep.failures:
        mtbf_s = upkeep.mtbf.mean_s
    return [*parts, *_advice_section(costs, mtbf_s)]


def _advice_section(costs: SavingCosts, mtbf_s: float | None) -> list[DoctorSection]:
    """Return the advised checkpoint interval; a hint if the MTBF is unknown."""
    if mtbf_s is None:
        hint = ("how often to save", "add --mtbf, such as --mtbf 8h: the mean time between failures")
        return [DoctorSection("advice", "how often to save", {}, [hint])]
    values, rows = advise_interval(costs, mtbf_s)
    return [DoctorSection("advice", "how often to save", values, rows)]


def _measure_saving(recipe: Recipe, data: "Data", folder: Path) -> tuple[CheckpointResult | None, DoctorSection]:
    """Measure saving the recipe's state in `folder`; None and the reason if that fails."""
    from paceline.train.save_trial import measure_saving

    try:
        saving = measure_saving(recipe, folder, data())
    except PacelineError as error:
        return None, DoctorSection("saving", "saving", {"error": str(error)}, [("not measured", str(error))])
    title = f"saving, measured now on one rank at {folder.absolute()}"
    return saving, DoctorSection("saving", title, saving.model_dump(), [_saving_row(saving)])


def _saving_row(saving: CheckpointResult) -> tuple[str, ...]:
    return "checkpoints", saving_line(saving)


def _history_section(run: RunDir, upkeep: "RunHistory") -> DoctorSection:
    """Return the history of the run so far."""
    rows: list[tuple[str, ...]] = []
    if upkeep.step_s:
        median_s, slow_s = upkeep.step_s
        rows.append(("step", f"{1000 * median_s:.1f} ms, the 99th percentile {1000 * slow_s:.1f} ms"))
    if upkeep.goodput is not None:
        rows.append(("goodput", goodput_line(upkeep.goodput)))
    what = "from a failure to the first new step" if upkeep.restarts else "to start; detection and queueing come on top"
    rows.append(("restart", f"{upkeep.restart_s:.1f} s {what}"))
    rows.append(("failures", _failures_text(upkeep)))
    if upkeep.at_risk_s:
        rows.append(("at risk", f"{approximate_time(upkeep.at_risk_s)} of training since the newest checkpoint"))
    mtbf = upkeep.mtbf
    values = {
        "step_s": upkeep.step_s,
        "goodput": upkeep.goodput.model_dump() if upkeep.goodput else None,
        "restart_s": upkeep.restart_s,
        "restarts": upkeep.restarts,
        "failures": upkeep.failures,
        "up_s": upkeep.up_s,
        "mtbf_s": {name: _finite_or_none(getattr(mtbf, f"{name}_s")) for name in ("mean", "low", "high")},
        "at_risk_s": upkeep.at_risk_s,
    }
    return DoctorSection("run", run.path.name, values, rows)


def _failures_text(upkeep: "RunHistory") -> str:
    mtbf, up = upkeep.mtbf, approximate_time(upkeep.up_s)
    if not upkeep.failures:
        return f"none in {up}, so at least {approximate_time(mtbf.low_s)} apart (95 % confidence)"
    apart = f"one in {approximate_time(mtbf.mean_s)} ({approximate_time(mtbf.low_s)} to {approximate_time(mtbf.high_s)}, 95 % confidence)"
    return f"{upkeep.failures:,} in {up}: {apart}"


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None
