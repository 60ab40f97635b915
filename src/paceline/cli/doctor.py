"""`paceline doctor`: check the machine or all ranks, and recommend a checkpoint interval."""

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from paceline.cli.args import count_ranks, split_recipe_args
from paceline.cli.options import DoctorOptions
from paceline.cli.ranks import enter_world, refuse_too_many, start_ranks
from paceline.cli.start_line import announce, describe_hardware
from paceline.cli.start_time import START_TIME_S
from paceline.cli.tables import print_rows
from paceline.core import units
from paceline.core.errors import PacelineError, RecipeError, WorldError
from paceline.core.goodput import best_interval, efficiency, interval_steps, signal_lead, young_interval
from paceline.core.results import CheckpointResult
from paceline.core.run_dir import RunDir, is_run
from paceline.core.units import Duration, count, rough_duration
from paceline.core.world import World
from paceline.lab.doctor.check import DoctorFinding, HostContext, find_worst_state
from paceline.lab.doctor.host import check_host
from paceline.models.weights_recipe import with_cached_weights_defaults
from paceline.recipe.consent import require_consent
from paceline.recipe.load import load
from paceline.recipe.schema.data import Data
from paceline.recipe.schema.recipe import Checkpoint
from paceline.recipe.schema.train import Parallel
from paceline.report.run_summary import describe_checkpoints, describe_goodput

if TYPE_CHECKING:
    from paceline.cli.run_history import RunHistory
    from paceline.core.dataset import Datasets

_MARKS: Final = {"ok": "ok", "warning": "WARNING", "error": "ERROR"}
_ROUND_TIMES: Final = (
    *((seconds, f"{seconds}s") for seconds in (1, 2, 3, 5, 10, 15, 20, 30)),
    *((60 * minutes, f"{minutes}min") for minutes in (1, 2, 3, 5, 10, 15, 20, 30)),
    *((3600 * hours, f"{hours}h") for hours in (1, 2, 3, 4, 6, 8, 12, 24)),
)
_MIN_GAIN: Final = 0.001
"""Share of wall-clock time below which a better interval is not worth mentioning."""
FAILED_CODE = 1
"""Exit code if a run would fail."""


@dataclass(frozen=True)
class SavingCosts:
    """Costs of saving and restarting in seconds, as in `core.goodput`; None if unknown.

    `step_s` is a typical step, `slow_s` a slow one, `every_s` the current interval.
    """

    stall_s: float
    write_s: float
    restart_s: float
    step_s: float | None = None
    every_s: float | None = None
    slow_s: float | None = None


@dataclass(frozen=True)
class DoctorSection:
    """Section of the output: its key in JSON, title, values and rows."""

    key: str
    title: str
    values: Any
    rows: list[tuple[str, ...]]


def doctor(options: DoctorOptions) -> int:
    """Run `paceline doctor`, and return the exit code."""
    args, mtbf_s = options.args, _parse_mtbf(options.mtbf) if options.mtbf else None
    run = find_run(args)
    loaded = load(*split_recipe_args(args)) if args or mtbf_s is not None else None
    if loaded:
        require_consent(loaded, trust_code=options.trust_code)
        loaded, _ = with_cached_weights_defaults(loaded)
    recipe = loaded.recipe if loaded else None
    environ = dict(os.environ)  # as given, before this process changes it
    world = _enter_world()
    to_start = _ranks_to_start(options.ranks, world, environ)
    announce(f"checking {'this machine' if to_start == 1 else count(to_start, 'rank')}, {describe_hardware()}")
    refuse_too_many(to_start, recipe.parallel.device if recipe else "auto", oversubscribe=options.oversubscribe)
    if to_start > 1:
        return start_ranks(to_start, options.port, [])
    folder = options.run_dir.expanduser() if options.run_dir else run.path if run else Path("runs")
    host = HostContext(environ, folder)
    machine = [*check_host(host)]
    if recipe is not None:
        from paceline.lab.doctor.recipe import check_recipe

        data = cache(partial(_build_datasets, recipe.data))  # once: opening data can be slow on a network file system
        machine.append(check_recipe(recipe, world, data))
    shared = _check_ranks(world, machine, recipe.parallel if recipe else None) if world.world_size > 1 else ()
    if shared is None:
        return 0
    findings = [*machine, *shared]
    parts = [_findings_section("machine", "this machine", machine)]
    parts += [_findings_section("ranks", "the ranks", shared)] if shared else []
    if recipe is not None:
        from paceline.training.preflight import measure_saving

        parts += _saving_sections(recipe.checkpoint, run, lambda folder: measure_saving(recipe, folder, data()), mtbf_s)
    _print_sections(parts, findings, as_json=options.as_json)
    return FAILED_CODE if find_worst_state(findings) == "error" else 0


def _enter_world() -> World:
    """Return this process's world; contradictory variables are a finding, not an error."""
    try:
        return enter_world()
    except WorldError:
        return World.single()


def _ranks_to_start(text: str | None, world: World, environ: Mapping[str, str]) -> int:
    if text is None or (world.launcher != "single" and text in ("auto", str(world.world_size))):
        return 1
    if world.launcher != "single":
        started = f"{count(world.world_size, 'rank')} were started by {world.launcher}"
        raise WorldError(f"--ranks: {text}, but {started} (leave --ranks out)")
    return count_ranks(text, environ)


def _build_datasets(section: Data) -> "Datasets":
    from paceline.data.sources.folds import build_run_datasets

    # A check must not download.
    return build_run_datasets(section, may_download=False, skip_bad=section.on_bad_image == "skip")


def _check_ranks(
    world: World, machine: Sequence[DoctorFinding], section: Parallel | None
) -> tuple[DoctorFinding, ...] | None:
    """Return the findings of all ranks on rank 0, None on the others."""
    # NCCL then raises an error if ranks do not answer; otherwise it would end the process, findings included.
    # https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
    from paceline.lab.doctor.ranks import check_ranks

    return check_ranks(world, machine, os.environ, section=section)


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


def find_run(args: list[str]) -> RunDir | None:
    """Return the run that `[RECIPE] [KEY=VALUE ...]` names in place of a recipe, or None."""
    folder = Path(args[0]).expanduser() if args and "=" not in args[0] else None
    return RunDir(folder) if folder and is_run(folder) else None


def _saving_sections(
    checkpoint: Checkpoint, run: RunDir | None, measure: Callable[[Path], CheckpointResult], mtbf_s: float | None
) -> list[DoctorSection]:
    """Return the history of `run`, the cost of saving, as in it or as `measure` finds, and the advised interval."""
    parts, history = [], None
    if run is not None:
        from paceline.cli.run_history import read_run_history

        history = read_run_history(run, checkpoint)
        parts.append(_history_section(run, history))
    saving, title = history.saving if history else None, "saving, as measured by the run"
    if saving is None:
        folder = run.path if run else Path()
        try:
            saving = measure(folder)
        except PacelineError as error:
            return [*parts, DoctorSection("saving", "saving", {"error": str(error)}, [("not measured", str(error))])]
        title = f"saving, measured now on one rank at {folder.absolute()}"
    section = DoctorSection("saving", title, saving.model_dump(), [("checkpoints", describe_checkpoints(saving))])
    if history is not None:
        step_s, slow_s = history.step_s or (None, None)
        costs = SavingCosts(saving.stall_s, saving.write_s, history.restart_s, step_s, history.every_s, slow_s)
        if mtbf_s is None and history.failures:
            mtbf_s = history.mtbf.mean_s
    else:
        every = checkpoint.every
        restart_s = time.perf_counter() - START_TIME_S
        assumed = "assumed: the start-up of this command; joining ranks, data and the first step come on top"
        section.rows.append(("restart", f"{units.seconds(restart_s)}, {assumed}"))
        section.values["restart_s"] = restart_s
        every_s = every.seconds if every != "off" and every.is_time else None
        costs = SavingCosts(saving.stall_s, saving.write_s, restart_s, every_s=every_s)
    values: dict[str, Any] = {}
    rows: list[tuple[str, ...]] = [
        ("how often to save", "add --mtbf, such as --mtbf 8h: the mean time between failures")
    ]
    if mtbf_s is not None:
        values, rows = advise_interval(costs, mtbf_s)
    return [*parts, section, DoctorSection("advice", "how often to save", values, rows)]


def _history_section(run: RunDir, history: "RunHistory") -> DoctorSection:
    rows: list[tuple[str, ...]] = []
    if history.step_s:
        median_s, slow_s = history.step_s
        rows.append(("step", f"{units.milliseconds(median_s)}, the 99th percentile {units.milliseconds(slow_s)}"))
    if history.goodput is not None:
        rows.append(("goodput", describe_goodput(history.goodput)))
    what = (
        "from a failure to the first new step" if history.restarts else "to start; detection and queueing come on top"
    )
    rows.append(("restart", f"{units.seconds(history.restart_s)} {what}"))
    rows.append(("failures", _failures_text(history)))
    if history.at_risk_s:
        rows.append(("at risk", f"{rough_duration(history.at_risk_s)} of training since the newest checkpoint"))
    mtbf = history.mtbf
    values = {
        "step_s": history.step_s,
        "goodput": history.goodput.model_dump() if history.goodput else None,
        "restart_s": history.restart_s,
        "restarts": history.restarts,
        "failures": history.failures,
        "up_s": history.up_s,
        "mtbf_s": {name: _finite_or_none(getattr(mtbf, f"{name}_s")) for name in ("mean", "low", "high")},
        "at_risk_s": history.at_risk_s,
    }
    return DoctorSection("run", run.path.name, values, rows)


def _failures_text(history: "RunHistory") -> str:
    mtbf, up = history.mtbf, rough_duration(history.up_s)
    if not history.failures:
        return f"none in {up}, so at least {rough_duration(mtbf.low_s)} apart (95 % confidence)"
    interval = f"{rough_duration(mtbf.low_s)} to {rough_duration(mtbf.high_s)}, 95 % confidence"
    return f"{history.failures:,} in {up}: one in {rough_duration(mtbf.mean_s)} ({interval})"


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def finding_rows(findings: Iterable[DoctorFinding]) -> list[tuple[str, ...]]:
    """Return one row per finding: check, state, and result with advice below."""
    return [(each.name, _MARKS[each.state], "\n".join(_finding_lines(each))) for each in findings]


def summarize_findings(findings: Sequence[DoctorFinding]) -> str:
    """Return one sentence about all findings."""
    errors, warnings = (sum(each.state == state for each in findings) for state in ("error", "warning"))
    warned = count(warnings, "warning")
    if errors:
        return f"a run would fail: {count(errors, 'error')}" + (f", {warned}" if warnings else "")
    return f"a run would work; {warned}" if warnings else "all is well"


def _finding_lines(finding: DoctorFinding) -> list[str]:
    text = f"{finding.where}: {finding.found}" if finding.where else finding.found
    return [text, *([f"-> {finding.advice}"] if finding.advice else [])]


def advise_interval(costs: SavingCosts, mtbf_s: float) -> tuple[dict[str, Any], list[tuple[str, ...]]]:
    """Return the advised interval as JSON values and as rows, for failures `mtbf_s` apart."""
    best_s = best_interval(costs.stall_s, costs.write_s, mtbf_s)
    step_s = costs.step_s
    steps = interval_steps(best_s, step_s) if step_s is not None else None
    if steps is not None and step_s is not None:
        best_s = steps * step_s
    # The cost is flat around its minimum; an interval below the write time cannot be kept.
    low_s, high_s = max(best_s / 2, costs.write_s), 2 * best_s
    shares = {each: _useful_share(costs, each, mtbf_s) for each in (best_s, low_s, high_s)}
    setting = _round_setting(best_s, low_s, high_s, steps)
    best = f"every {rough_duration(best_s)}" + (f", {steps:,} steps" if steps is not None else "")
    as_good = f"{rough_duration(low_s)} to {rough_duration(high_s)}"
    losses = f"lose {1 - shares[low_s]:.2%} and {1 - shares[high_s]:.2%}"
    rows: list[tuple[str, ...]] = [
        ("failures", f"assumed {rough_duration(mtbf_s)} apart"),
        ("best", f"{best}: loses {1 - shares[best_s]:.2%}, restarts included (Daly 2006)"),
        ("as good", f"{as_good}: {losses}, such as checkpoint.every={setting}"),
    ]
    values: dict[str, Any] = {
        "mtbf_s": mtbf_s,
        "young_s": young_interval(costs.stall_s, mtbf_s),
        "best_s": best_s,
        "best_steps": steps,
        "best_cost": 1 - shares[best_s],
        "range_s": [low_s, high_s],
        "setting": f"checkpoint.every={setting}",
        "now_s": costs.every_s,
    }
    if costs.every_s is not None:
        values["now_cost"] = 1 - _useful_share(costs, costs.every_s, mtbf_s)
        values["worst_loss_s"] = costs.every_s + costs.write_s
        rows += _current_rows(costs, values["now_cost"], values["best_cost"])
    slow_s = costs.slow_s if costs.slow_s is not None else 0.0
    values["signal_lead_s"] = signal_lead(slow_s, costs.stall_s + costs.write_s)
    rows.append(
        ("lead time", f"{units.duration(values['signal_lead_s'])} of warning before a job ends (sbatch --signal)")
    )
    return values, rows


def _current_rows(costs: SavingCosts, now: float, best: float) -> Sequence[tuple[str, ...]]:
    assert costs.every_s is not None
    verdict = f"{now - best:.2%} more than the best" if now - best >= _MIN_GAIN else "as good as the best"
    return (
        ("now", f"you save every {rough_duration(costs.every_s)}: loses {now:.2%}, {verdict}"),
        ("worst case", f"a kill loses up to {rough_duration(costs.every_s + costs.write_s)} of training"),
    )


def _useful_share(costs: SavingCosts, work_s: float, mtbf_s: float) -> float:
    return efficiency(work_s, costs.stall_s, costs.restart_s, mtbf_s, write_s=costs.write_s)


def _round_setting(best_s: float, low_s: float, high_s: float, steps: int | None) -> str:
    """Return the round duration closest to the best by ratio; `steps` if none is in range."""
    inside = [each for each in _ROUND_TIMES if low_s <= each[0] <= high_s]
    if not inside and steps is not None:
        return f"{steps}st"
    return min(inside or _ROUND_TIMES, key=lambda each: max(each[0] / best_s, best_s / each[0]))[1]
