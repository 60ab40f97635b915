"""`paceline profile`: measure a few steps of a recipe, and what would save time.

The profile's folder is the run directory of its base run; other runs lie in `probes/` below it. Under torchrun and srun
only the base run is made, on the ranks that exist; all others are left out, with the commands to start them.
"""

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Final

from paceline.cli.experiment import STOP_SIGNALS
from paceline.cli.ranks import enter_world, ranks_to_start
from paceline.cli.report import try_write_report
from paceline.cli.started import START_TIME_S
from paceline.cli.telling import progress_output
from paceline.cli.words import refuse_length, split_recipe_args
from paceline.core.console import progress_console
from paceline.core.errors import RecipeError
from paceline.core.process import ignore_stop_signals
from paceline.core.rundir import RunDir
from paceline.core.units import count
from paceline.core.world import World
from paceline.lab.measuring import build_measurement_patch
from paceline.lab.probes import BASE, TRACE, SkippedProbe, build_base_trial, build_instrumented_trials, build_probes
from paceline.lab.runner import TrialError, TrialRunner, interrupt_on_signals
from paceline.lab.trial import Trial, TrialOutcome, apply_patch, format_patch, write_recipe
from paceline.lab.turns import run_interleaved
from paceline.parallel.environ import launch_name
from paceline.parallel.launch import PREEMPTED
from paceline.recipe.consent import consent_arguments, require_consent
from paceline.recipe.load import load
from paceline.recipe.patch import Patch
from paceline.recipe.plan import divide_batch, resolve_batch
from paceline.recipe.schema import Recipe

_BASE_RECIPE: Final = "base.yaml"


@dataclass(frozen=True)
class _ProfileRequest:
    """Request: `recipe` is the measured form of the recipe with hash `recipe_hash`.

    `nvtx` is the value of `measure.nvtx` for a run under Nsight Systems, `off` for none.
    """

    recipe_hash: str
    recipe: Recipe
    steps: int
    ranks: int
    base: Trial
    probes: Sequence[Trial]
    separate: Sequence[Trial]
    left_out: Sequence[SkippedProbe]
    nvtx: str
    oversubscribe: bool = False

    @property
    def trials(self) -> list[Trial]:
        """All trials; those that are compared with nothing come last."""
        return [self.base, *self.probes, *self.separate]

    def trials_in_repeat(self, repeat: int) -> list[Trial]:
        """Return the trials of a repeat, counted from 1."""
        return [trial for trial in self.trials if repeat <= trial.repeats]


def profile(
    args: list[str],
    ranks: str,
    run_dir: Path | None,
    *,
    steps: int,
    repeats: int,
    probes: bool,
    trace: bool,
    nvtx: bool,
    own_code: bool = False,
    as_json: bool,
    oversubscribe: bool = False,
) -> int:
    """Run `paceline profile`, and return the exit code."""
    name, overrides = split_recipe_args(args)
    refuse_length(overrides, "a profile", purpose="profile")
    loaded = load(name, overrides)
    require_consent(loaded, own_code=own_code)
    world = enter_world()
    num_ranks = ranks_to_start(ranks, world, loaded.recipe, oversubscribe=oversubscribe)
    loaded = replace(loaded, recipe=resolve_batch(loaded.recipe, num_ranks))
    measure = loaded.recipe.measure
    trace, marks = trace or measure.trace != "off", "on" if nvtx and measure.nvtx == "off" else measure.nvtx
    _refuse_more_runs(world, repeats=repeats, trace=trace, nvtx=marks != "off")
    recipe = apply_patch(loaded.recipe, build_measurement_patch(loaded.recipe, steps, overrides))
    divide_batch(recipe, num_ranks)
    trials, left_out = build_probes(recipe, num_ranks, repeats) if probes else ([], [])
    request = _ProfileRequest(
        recipe_hash=loaded.recipe.hash,
        recipe=recipe,
        steps=steps,
        ranks=num_ranks,
        base=build_base_trial(repeats),
        probes=trials,
        separate=build_instrumented_trials(loaded.recipe, num_ranks, steps, overrides, trace=trace),
        left_out=left_out,
        nvtx=marks,
        oversubscribe=oversubscribe,
    )
    rundir = _choose_rundir(loaded.name, run_dir, world)
    try:
        if world.launcher == "single":
            return _run_trials(request, rundir, as_json=as_json)
        return _run_as_rank(request, rundir, world, as_json=as_json)
    finally:
        if run_dir is None and world.is_main:
            rundir.release()


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
    """Return the directory to write: `run_dir`, or a new folder under `runs/`; other ranks follow rank 0."""
    if not world.is_main:
        return RunDir(run_dir or Path("runs"))
    if run_dir is None:
        return RunDir.claim(f"profile-{name}", datetime.now().astimezone())
    rundir = RunDir(run_dir.expanduser())
    rundir.refuse_links()
    rundir.refuse_another_run(resume=False)
    return rundir


def _run_trials(request: _ProfileRequest, rundir: RunDir, *, as_json: bool) -> int:
    """Run the trials in child processes, write the results, and print them."""
    out = progress_console(as_json=as_json)
    recipe_file = rundir.path / _BASE_RECIPE
    write_recipe(request.recipe, recipe_file)
    outcomes: list[TrialOutcome] = []
    try:
        with interrupt_on_signals(*STOP_SIGNALS), progress_output(out, _num_runs(request)) as (on_start, print_line):
            print_line(_plan_text(request))
            runner = TrialRunner(
                request.recipe,
                recipe_file,
                request.ranks,
                get_folder=lambda trial, repeat: _trial_folder(rundir, trial, repeat),
                before_run=on_start,
                oversubscribe=request.oversubscribe,
            )
            for outcome in run_interleaved(request.trials_in_repeat, request.base.repeats, runner):
                _check_base(outcome)
                print_line(_outcome_line(outcome))
                outcomes.append(outcome)
    except TrialError:
        if not rundir.recipe.exists():  # refused at once: there is no run to inspect
            recipe_file.unlink()
        raise
    _move_trace(outcomes, rundir)
    _finish_profile(request, outcomes, rundir, as_json=as_json)
    return 0


def _plan_text(request: _ProfileRequest) -> str:
    """Return how many runs and steps there are."""
    steps = request.recipe.measure.warmup_steps + request.steps
    return f"{count(_num_runs(request), 'run')} of {count(steps, 'step')}"


def _num_runs(request: _ProfileRequest) -> int:
    return sum(trial.repeats for trial in request.trials)


def _trial_folder(rundir: RunDir, trial: Trial, repeat: int) -> Path:
    is_ours = trial.name == BASE and repeat == 1
    return rundir.path if is_ours else rundir.path / "probes" / f"{trial.name}-{repeat}"


def _check_base(outcome: TrialOutcome) -> None:
    """Raise the error of a failed base run, without which nothing can be compared."""
    if outcome.trial.name != BASE or outcome.result is not None:
        return
    if outcome.exit_code == 1:  # a bug of paceline's: print its traceback too
        print(
            *(line for line in outcome.stderr.splitlines() if not line.startswith("error: ")), sep="\n", file=sys.stderr
        )
    raise TrialError(outcome.error, outcome.exit_code)


def _outcome_line(outcome: TrialOutcome) -> str:
    name = outcome.trial.name + (f", repeat {outcome.repeat}" if outcome.trial.repeats > 1 else "")
    if outcome.result is None:
        return f"{name}: failed: {outcome.error}"
    return f"{name}: {outcome.result.throughput.images_per_s:,.0f} images/s"


def _move_trace(outcomes: Sequence[TrialOutcome], rundir: RunDir) -> None:
    """Move the trace to the place where a run has its own."""
    for traced in (outcome.rundir for outcome in outcomes if outcome.trial.name == TRACE):
        for source, target in ((traced.trace, rundir.trace), (traced.merged_trace, rundir.merged_trace)):
            if source.exists():
                shutil.move(source, target)


def _finish_profile(
    request: _ProfileRequest, outcomes: Sequence[TrialOutcome], rundir: RunDir, *, as_json: bool
) -> None:
    """Write `profile.json` and the report, and print the result."""
    from paceline.cli.show_profile import show_profile
    from paceline.lab.profile import build_profile

    result = build_profile(
        outcomes, request.recipe, recipe_hash=request.recipe_hash, steps=request.steps, left_out=request.left_out
    )
    rundir.write_json(rundir.profile.name, result.to_dict())
    try_write_report(rundir)
    nsys = "" if request.nvtx == "off" else _nsys_command(request, rundir)
    show_profile(result, rundir, nsys=nsys, as_json=as_json)


def _nsys_command(request: _ProfileRequest, rundir: RunDir) -> str:
    """Return the command that measures the base run under Nsight Systems, from the end of its warm-up to its last step.

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
    program = ("paceline", "train", recipe_file, *marked, *consent_arguments(request.recipe))
    return shlex.join(("nsys", "profile", *options, *program, "--ranks", str(request.ranks), "--run-dir", folder))


def _run_as_rank(request: _ProfileRequest, rundir: RunDir, world: World, *, as_json: bool) -> int:
    """Run the base run as one rank of a launcher; rank 0 writes and prints the result."""
    from paceline.train.interrupt import Interrupts

    with Interrupts(announces=world.is_main) as interrupts:
        from paceline.cli.progress import build_train_progress
        from paceline.train.job import Invocation
        from paceline.train.run import run
        from paceline.train.whereabouts import ProgressReporter

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
        result = run(request.recipe, world, rundir, invocation=invocation)
        if result.status == "preempted":
            ignore_stop_signals()
            return PREEMPTED
    if world.is_main:
        write_recipe(request.recipe, rundir.path / _BASE_RECIPE)
        by_hand = [
            SkippedProbe(trial.name, _manual_start_hint(trial, rundir, request.recipe))
            for trial in (*request.probes, *request.separate)
        ]
        alone = replace(request, left_out=(*request.left_out, *by_hand))
        _finish_profile(alone, [TrialOutcome(request.base, 1, rundir, result)], rundir, as_json=as_json)
    return 0


def _manual_start_hint(trial: Trial, rundir: RunDir, recipe: Recipe) -> str:
    """Return the command for a run that a launcher's rank cannot start."""
    consent = consent_arguments(recipe)
    args = shlex.join(("train", str(rundir.path / _BASE_RECIPE), *format_patch(trial.patch), *consent))
    return f"needs separate ranks (start them like these, with: {args})"
