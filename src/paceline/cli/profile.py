"""`paceline profile`: measure where the time of a step goes and what would save time, or each value of a setting."""

import json
import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from paceline import __version__
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
from paceline.cli.progress_output import progress_output
from paceline.cli.ranks import enter_world, ranks_to_start
from paceline.cli.start_line import announce, describe_hardware
from paceline.cli.start_time import START_TIME_S
from paceline.core.console import progress_console
from paceline.core.errors import RecipeError
from paceline.core.experiments.results import SweepResult
from paceline.core.process import ignore_stop_signals
from paceline.core.run_dir import RunDir
from paceline.core.units import count, per_second, share
from paceline.core.world import World
from paceline.data.files import printable
from paceline.lab.patches import build_measurement_patch
from paceline.lab.probes import BASE, TRACE, SkippedProbe, build_base_trial, build_instrumented_trials, build_probes
from paceline.lab.repeat import alternate_order, run_interleaved
from paceline.lab.runner import TrialError, TrialRunner, interrupt_on_signals
from paceline.lab.sweep import Sweep, build_sweep, build_sweep_points, summarize_sweep
from paceline.lab.trial import Trial, TrialOutcome, apply_patch, format_patch, write_recipe
from paceline.models.weights_recipe import with_weights_defaults
from paceline.parallel.environ import launch_name
from paceline.parallel.launch import PREEMPTED
from paceline.recipe.consent import consent_arguments, require_consent
from paceline.recipe.load import Patch, load
from paceline.recipe.plan import divide_batch, resolve_batch
from paceline.report.document import TableCell

if TYPE_CHECKING:
    from paceline.lab.profile import Profile

_BASE_RECIPE: Final = "base.yaml"


@dataclass(frozen=True)
class _ProfileRequest:
    """Trials of a profile; `nvtx` is `measure.nvtx` of a run under Nsight Systems, `off` for none."""

    runs: ShortRuns
    base: Trial
    probes: Sequence[Trial]
    separate: Sequence[Trial]
    left_out: Sequence[SkippedProbe]
    nvtx: str

    @property
    def trials(self) -> list[Trial]:
        """Trials; those that are compared with nothing come last."""
        return [self.base, *self.probes, *self.separate]

    def trials_in_repeat(self, repeat: int) -> list[Trial]:
        return [trial for trial in self.trials if repeat <= trial.repeats]


def profile(options: ProfileOptions) -> int:
    """Run `paceline profile`, and return the exit code."""
    if options.vary:
        return _sweep(options)
    name, overrides = split_recipe_args(options.args)
    refuse_length(overrides, "a profile", purpose="profile")
    loaded = with_weights_defaults(load(name, overrides))
    require_consent(loaded, trust_code=options.trust_code)
    world = enter_world()
    num_ranks = ranks_to_start(options.ranks, world, loaded.recipe.parallel, oversubscribe=options.oversubscribe)
    loaded = replace(loaded, recipe=resolve_batch(loaded.recipe, num_ranks))
    measure = loaded.recipe.measure
    trace = options.trace or measure.trace != "off"
    nvtx = "on" if options.nvtx and measure.nvtx == "off" else measure.nvtx
    _refuse_more_runs(world, repeats=options.repeats, trace=trace, nvtx=nvtx != "off")
    recipe = apply_patch(loaded.recipe, build_measurement_patch(loaded.recipe, options.steps, overrides))
    divide_batch(recipe, num_ranks)
    trials, left_out = build_probes(recipe, num_ranks, options.repeats) if options.probes else ([], [])
    request = _ProfileRequest(
        runs=ShortRuns(loaded, recipe, num_ranks, options.steps, options.repeats, options.oversubscribe),
        base=build_base_trial(options.repeats),
        probes=trials,
        separate=build_instrumented_trials(loaded.recipe, num_ranks, options.steps, overrides, trace=trace),
        left_out=left_out,
        nvtx=nvtx,
    )
    announce(f"profiling {loaded.name} on {count(num_ranks, 'rank')}, {describe_hardware(recipe.parallel.device)}")
    rundir = _choose_rundir(loaded.name, options.run_dir, world)
    try:
        if world.launcher == "single":
            return _run_trials(request, rundir, as_json=options.as_json)
        return _run_as_rank(request, rundir, world, as_json=options.as_json)
    finally:
        if options.run_dir is None and world.is_main:
            rundir.release()


def _sweep(options: ProfileOptions) -> int:
    """Measure each value of a setting, and return the exit code."""
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


def _refuse_more_runs(world: World, *, repeats: int, trace: bool, nvtx: bool) -> None:
    """Raise `RecipeError` for options that need runs of their own, which ranks of a launcher cannot start."""
    if world.launcher == "single":
        return
    ranks = f"which ranks started by {world.launcher} cannot start"
    if repeats > 1:
        raise RecipeError(f"--repeats: {repeats} needs separate runs, {ranks} (leave it out)")
    if trace:
        fix = "leave it out, and start `paceline train` with measure.trace=40 for it"
        raise RecipeError(f"--trace: needs a separate run, {ranks} ({fix})")
    if nvtx:
        fix = "leave it out, and start `paceline train` with measure.nvtx=on under nsys"
        raise RecipeError(f"--nvtx: needs a separate run, {ranks} ({fix})")


def _choose_rundir(name: str, run_dir: Path | None, world: World) -> RunDir:
    """Return `run_dir`, or a new folder under `runs/`."""
    if not world.is_main:
        return RunDir(run_dir or Path("runs"))
    if run_dir is None:
        return RunDir.claim(f"profile-{name}", datetime.now().astimezone())
    rundir = RunDir(run_dir.expanduser())
    rundir.refuse_links()
    rundir.refuse_another_run(resume=False)
    return rundir


def _run_trials(request: _ProfileRequest, rundir: RunDir, *, as_json: bool) -> int:
    out, runs = progress_console(as_json=as_json), request.runs
    recipe_file = rundir.path / _BASE_RECIPE
    write_recipe(runs.recipe, recipe_file)
    outcomes: list[TrialOutcome] = []
    num_runs = sum(trial.repeats for trial in request.trials)
    try:
        with interrupt_on_signals(), progress_output(out, num_runs) as (on_start, print_line):
            print_line(f"{count(num_runs, 'run')} of {count(runs.total_steps, 'step')}")
            runner = TrialRunner(
                runs.recipe,
                recipe_file,
                runs.ranks,
                get_folder=lambda trial, repeat: _trial_folder(rundir, trial, repeat),
                before_run=on_start,
                oversubscribe=runs.oversubscribe,
            )
            for outcome in run_interleaved(request.trials_in_repeat, request.base.repeats, runner):
                if outcome.trial.name == BASE and outcome.result is None:
                    raise_failed(outcome)
                print_line(describe_outcome(outcome, outcome.trial.repeats))
                outcomes.append(outcome)
    except TrialError:
        if not rundir.recipe.exists():  # refused at once: there is no run to inspect
            recipe_file.unlink()
        raise
    _move_trace(outcomes, rundir)
    _finish_profile(request, outcomes, rundir, as_json=as_json)
    return 0


def _trial_folder(rundir: RunDir, trial: Trial, repeat: int) -> Path:
    is_ours = trial.name == BASE and repeat == 1
    return rundir.path if is_ours else rundir.path / "probes" / f"{trial.name}-{repeat}"


def _move_trace(outcomes: Sequence[TrialOutcome], rundir: RunDir) -> None:
    for traced in (outcome.rundir for outcome in outcomes if outcome.trial.name == TRACE):
        for source, target in ((traced.trace, rundir.trace), (traced.merged_trace, rundir.merged_trace)):
            if source.exists():
                shutil.move(source, target)


def _finish_profile(
    request: _ProfileRequest, outcomes: Sequence[TrialOutcome], rundir: RunDir, *, as_json: bool
) -> None:
    from paceline.cli.report import try_write_report
    from paceline.lab.profile import build_profile

    recipe, recipe_hash = request.runs.recipe, request.runs.loaded.recipe.hash
    result = build_profile(
        outcomes, recipe, recipe_hash=recipe_hash, steps=request.runs.steps, left_out=request.left_out
    )
    rundir.write_json(rundir.profile.name, result.to_dict())
    try_write_report(rundir)
    nsys = "" if request.nvtx == "off" else _nsys_command(request, rundir)
    show_profile(result, rundir, nsys=nsys, as_json=as_json)


def _nsys_command(request: _ProfileRequest, rundir: RunDir) -> str:
    """Return the command that profiles the measured steps of the base run with Nsight Systems.

    Options: https://docs.nvidia.com/nsight-systems/UserGuide/index.html.
    """
    # A range is found by its name only if names need not be registered: torch's are not. `stop` lets the program
    # run on after the range.
    options = (
        "--trace=cuda,nvtx,osrt",
        "--capture-range=nvtx",
        "--nvtx-capture=PROFILE",
        "--capture-range-end=stop",
        "--env-var=NSYS_NVTX_PROFILER_REGISTER_ONLY=0",
        f"--output={rundir.path / 'nsys'}",
    )
    recipe_file, folder = str(rundir.path / _BASE_RECIPE), str(rundir.path / "probes" / "nsys-1")
    marked = format_patch(Patch((("measure.nvtx", request.nvtx),)))
    program = ("paceline", "train", recipe_file, *marked, *consent_arguments(request.runs.recipe))
    ranks = str(request.runs.ranks)
    return shlex.join(("nsys", "profile", *options, *program, "--ranks", ranks, "--run-dir", folder))


def _run_as_rank(request: _ProfileRequest, rundir: RunDir, world: World, *, as_json: bool) -> int:
    """Run the base run as a rank of a launcher; rank 0 writes and prints the result."""
    from paceline.core.interrupts import Interrupts

    with Interrupts(announces=world.is_main) as interrupts:
        from paceline.cli.train_progress import build_train_progress
        from paceline.training.process import Invocation, ProgressReporter
        from paceline.training.run import run

        position = ProgressReporter()
        listeners = [build_train_progress(progress_console(as_json=as_json), position)] if world.is_main else []
        invocation = Invocation(
            START_TIME_S,
            ("paceline", *sys.argv[1:]),
            listeners,
            launch=launch_name(os.environ, os.getppid(), os.uname().nodename),
            interrupts=interrupts,
            progress=position,
        )
        result = run(request.runs.recipe, world, rundir, invocation=invocation)
        if result.status == "preempted":
            ignore_stop_signals()
            return PREEMPTED
    if world.is_main:
        write_recipe(request.runs.recipe, rundir.path / _BASE_RECIPE)
        by_hand = [
            SkippedProbe(trial.name, _manual_start_hint(trial, rundir, consent_arguments(request.runs.recipe)))
            for trial in (*request.probes, *request.separate)
        ]
        alone = replace(request, left_out=(*request.left_out, *by_hand))
        _finish_profile(alone, [TrialOutcome(request.base, 1, rundir, result)], rundir, as_json=as_json)
    return 0


def _manual_start_hint(trial: Trial, rundir: RunDir, consent: Sequence[str]) -> str:
    args = shlex.join(("train", str(rundir.path / _BASE_RECIPE), *format_patch(trial.patch), *consent))
    return f"needs separate ranks (start them like these, with: {args})"


def show_profile(profile: "Profile", rundir: RunDir, *, nsys: str, as_json: bool) -> None:
    """Print the profile; `nsys` is the command for Nsight Systems, or ""."""
    if as_json:
        print(json.dumps(profile.to_dict(), indent=2))
        return
    # Here, as these imports would delay the first line.
    from paceline.report.cells import rate_cell
    from paceline.report.document import KeyFigure, KeyValueList, ReportPage
    from paceline.report.read_run import RunData
    from paceline.report.render_terminal import print_page
    from paceline.report.run_page import summarize_bottleneck
    from paceline.report.time_sections import loader_blocks, profile_blocks, rank_blocks, stage_table

    measured = {"verdict": profile.verdict, "communication": profile.communication}
    values, result = profile.to_dict(), profile.result.model_copy(update=measured)
    run = RunData(rundir.path, result=result, profile=values)
    low, high = map(per_second, profile.base.spread)
    page = ReportPage(
        title=f"profile of recipe {profile.recipe}",
        subtitle=(),
        status=f"{count(profile.steps, 'step')} per run",
        tone="good",
        figures=[KeyFigure("images/s", rate_cell(profile.base.images_per_s), f"{low} to {high}")],
        verdict=summarize_bottleneck(run),
        paceline=__version__,
        summary=[
            KeyValueList(list(_trace_rows(profile, rundir))),
            *filter(None, [stage_table(result, "rank 0, repeat 1" if profile.base.n > 1 else "rank 0")]),
            *loader_blocks(result.loader),
            *rank_blocks(run),
            *profile_blocks(values),
        ],
    )
    print_page(page)
    if nsys:
        print(f"Nsight Systems:\n  {nsys}")
    print(f"run directory: {printable(rundir.path)}")


def _trace_rows(profile: "Profile", rundir: RunDir) -> Iterator[tuple[str, TableCell]]:
    if profile.result.host_to_device is not None:
        yield "copy to device", TableCell(str(profile.result.host_to_device))
    if rundir.merged_trace.exists():
        yield "trace", TableCell(f"{rundir.merged_trace}: open it on https://ui.perfetto.dev")
        yield "", TableCell(f"{rundir.trace}: one per rank, for HolisticTraceAnalysis")
    if profile.trace_share is not None:
        agreement = f"stages in rank 0's trace sum to {share(profile.trace_share)} of its measured step time"
        yield "", TableCell(agreement)
