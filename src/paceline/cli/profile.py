"""`paceline profile`: measure where the time of a step goes, and what would save it."""

import json
import os
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from paceline.cli.args import refuse_length, split_recipe_args
from paceline.cli.experiment import STOP_SIGNALS, describe_outcome, raise_failed
from paceline.cli.options import ProfileOptions
from paceline.cli.progress_output import progress_output
from paceline.cli.ranks import enter_world, ranks_to_start
from paceline.cli.report import try_write_report
from paceline.cli.start_time import START_TIME_S
from paceline.cli.tables import print_rows, print_table
from paceline.core.console import progress_console
from paceline.core.errors import RecipeError
from paceline.core.process import ignore_stop_signals
from paceline.core.results import CommunicationResult, LoaderResult, StragglerResult
from paceline.core.run_dir import RunDir
from paceline.core.stages import display_name
from paceline.core.units import count, flops, milliseconds, number, seconds, share, size
from paceline.core.world import World
from paceline.data.files import printable
from paceline.lab.patches import build_measurement_patch
from paceline.lab.probes import BASE, TRACE, SkippedProbe, build_base_trial, build_instrumented_trials, build_probes
from paceline.lab.repeat import run_interleaved
from paceline.lab.runner import TrialError, TrialRunner, interrupt_on_signals
from paceline.lab.trial import Trial, TrialOutcome, apply_patch, format_patch, write_recipe
from paceline.parallel.environ import launch_name
from paceline.parallel.launch import PREEMPTED
from paceline.recipe.consent import consent_arguments, require_consent
from paceline.recipe.load import Patch, load
from paceline.recipe.plan import divide_batch, resolve_batch
from paceline.recipe.schema import Recipe
from paceline.report.render_terminal import print_blocks
from paceline.report.time_sections import stage_table

if TYPE_CHECKING:
    from paceline.lab.profile import ProbeResult, Profile, ThroughputSummary

_BASE_RECIPE: Final = "base.yaml"


@dataclass(frozen=True)
class _ProfileRequest:
    """Request; `recipe` is the recipe `recipe_hash` with the settings of a measurement.

    `nvtx` is `measure.nvtx` of a run under Nsight Systems, `off` for none.
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
        """Trials; those that are compared with nothing come last."""
        return [self.base, *self.probes, *self.separate]

    def trials_in_repeat(self, repeat: int) -> list[Trial]:
        return [trial for trial in self.trials if repeat <= trial.repeats]


def profile(options: ProfileOptions) -> int:
    """Run `paceline profile`, and return the exit code."""
    name, overrides = split_recipe_args(options.args)
    refuse_length(overrides, "a profile", purpose="profile")
    loaded = load(name, overrides)
    require_consent(loaded, own_code=options.own_code)
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
        recipe_hash=loaded.recipe.hash,
        recipe=recipe,
        steps=options.steps,
        ranks=num_ranks,
        base=build_base_trial(options.repeats),
        probes=trials,
        separate=build_instrumented_trials(loaded.recipe, num_ranks, options.steps, overrides, trace=trace),
        left_out=left_out,
        nvtx=nvtx,
        oversubscribe=options.oversubscribe,
    )
    rundir = _choose_rundir(loaded.name, options.run_dir, world)
    try:
        if world.launcher == "single":
            return _run_trials(request, rundir, as_json=options.as_json)
        return _run_as_rank(request, rundir, world, as_json=options.as_json)
    finally:
        if options.run_dir is None and world.is_main:
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


def _plan_text(request: _ProfileRequest) -> str:
    steps = request.recipe.measure.warmup_steps + request.steps
    return f"{count(_num_runs(request), 'run')} of {count(steps, 'step')}"


def _num_runs(request: _ProfileRequest) -> int:
    return sum(trial.repeats for trial in request.trials)


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
    from paceline.lab.profile import build_profile

    result = build_profile(
        outcomes, request.recipe, recipe_hash=request.recipe_hash, steps=request.steps, left_out=request.left_out
    )
    rundir.write_json(rundir.profile.name, result.to_dict())
    try_write_report(rundir)
    nsys = "" if request.nvtx == "off" else _nsys_command(request, rundir)
    show_profile(result, rundir, nsys=nsys, as_json=as_json)


def _nsys_command(request: _ProfileRequest, rundir: RunDir) -> str:
    """Return the command that profiles the counted steps of the base run with Nsight Systems.

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
    """Run the base run as a rank of a launcher; rank 0 writes and prints the result."""
    from paceline.training.preemption import Interrupts

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
    consent = consent_arguments(recipe)
    args = shlex.join(("train", str(rundir.path / _BASE_RECIPE), *format_patch(trial.patch), *consent))
    return f"needs separate ranks (start them like these, with: {args})"


def show_profile(profile: "Profile", rundir: RunDir, *, nsys: str, as_json: bool) -> None:
    """Print the profile; `nsys` is the command for Nsight Systems, or ""."""
    if as_json:
        print(json.dumps(profile.to_dict(), indent=2))
        return
    whose = ["rank 0"]
    whose += ["repeat 1"] if profile.base.n > 1 else []
    if stages := stage_table(profile.result, ", ".join(whose)):
        print_blocks(stages)
    if profile.result.loader is not None and profile.result.loader.batches:
        _print_loader(profile.result.loader)
    if profile.communication is not None:
        rows = [
            *_communication_rows(profile.communication, profile.timed_run),
            *_straggler_row(profile.result.straggler),
        ]
        print_rows(rows, "communication between ranks")
    if profile.probes:
        _print_probes(profile.base, profile.probes)
    print_rows(_profile_rows(profile, rundir), f"profile of recipe {profile.recipe}")
    if nsys:
        print(f"Nsight Systems:\n  {nsys}")
    print(f"run directory: {printable(rundir.path)}")


def _print_loader(loader: LoaderResult) -> None:
    """Print the time to make a batch."""
    # Not shares of a step: workers overlap with steps and with one another.
    parts = {
        "read": loader.read_s,
        "decode": loader.decode_s,
        "augment": loader.augment_s,
        "collate": loader.collate_s,
    }
    rows = [
        (name, milliseconds(each_s / loader.batches), seconds(each_s / max(1, loader.images)))
        for name, each_s in parts.items()
    ]
    workers = count(loader.workers, "worker") if loader.workers else "the rank itself"
    print_table(f"batch loading, by {workers}", ("part", "per batch", "per image"), rows)
    facts = [f"{size(loader.bytes_read / loader.batches)} read and {size(loader.bytes_made / loader.batches)} made"]
    if loader.workers:
        facts += [
            f"{share(loader.ready)} of batches were ready when requested",
            f"{number(loader.queue_depth)} in the queue",
        ]
    if loader.busy is not None:
        facts.append(f"workers were busy {share(loader.busy)} of the time")
    print(f"per batch: {', '.join(facts)}")


def _communication_rows(measured: CommunicationResult, timed_run: str) -> Iterable[tuple[str, str]]:
    yield "exposed", f"{milliseconds(measured.exposed_s)} per step ({share(measured.share)})"
    if measured.bytes is not None:
        yield "sent", f"{size(measured.bytes)} per step, in {count(len(measured.buckets), 'bucket')}"
    if measured.wire_s is not None:
        hidden = "" if measured.overlap is None else f", {share(measured.overlap)} of it overlapped with backward"
        where = f" (in the run {timed_run})" if timed_run else ""
        yield "on the wire", f"{milliseconds(measured.wire_s)} per step{hidden}{where}"


def _straggler_row(straggler: StragglerResult | None) -> Iterable[tuple[str, str]]:
    if straggler is None:
        return
    whom = "no rank in particular"
    if straggler.rank is not None:
        whom = f"rank {straggler.rank}, by {milliseconds(straggler.late_s)}" + (
            f", in {display_name(straggler.stage)}" if straggler.stage else ""
        )
    yield "waiting for stragglers", f"{milliseconds(straggler.lost_s)} per step ({share(straggler.share)}): {whom}"


def _print_probes(base: "ThroughputSummary", probes: Sequence["ProbeResult"]) -> None:
    rows = [("base", *_rate_cells(base), "1.00x", "nothing")]
    for probe in probes:
        spread = probe.ratio_spread
        ratio = f"{probe.ratio:.2f}x" + (f" ({spread[0]:.2f} to {spread[1]:.2f})" if spread else "")
        rows.append((probe.trial.name, *_rate_cells(probe.rate), ratio, probe.trial.explains))
    repeats = f"{count(base.n, 'run')} of each"
    headings = ("run", "images/s", "from", "to", "ratio", "free")
    print_table(f"with part of the work for free ({repeats})", headings, rows, text_columns=("free",))


def _rate_cells(rate: "ThroughputSummary") -> tuple[str, str, str]:
    return f"{rate.images_per_s:,.0f}", f"{rate.spread[0]:,.0f}", f"{rate.spread[1]:,.0f}"


def _profile_rows(profile: "Profile", rundir: RunDir) -> list[tuple[str, str]]:
    base, verdict = profile.base, profile.verdict
    low, high = base.spread
    rows = [("throughput", f"{base.images_per_s:,.0f} images/s ({low:,.0f} to {high:,.0f})")]
    if profile.result.host_to_device is not None:
        rows.append(("copy to device", str(profile.result.host_to_device)))
    rows += _cost_rows(profile.cost)
    rows.append(("bottleneck", f"{verdict['bottleneck']}. {verdict['evidence']}"))
    if verdict.get("ceiling"):
        rows.append(("ceiling", verdict["ceiling"]))
    if verdict["try"]:
        rows.append(("try", verdict["try"]))
    rows += [(each.name, f"left out: {each.reason}") for each in profile.left_out]
    if rundir.merged_trace.exists():
        rows.append(("trace", f"{printable(rundir.merged_trace)}: open it on https://ui.perfetto.dev"))
        rows.append(("", f"{printable(rundir.trace)}: one per rank, for HolisticTraceAnalysis"))
    if profile.trace_share is not None:
        rows.append(("", f"stages in rank 0's trace sum to {share(profile.trace_share)} of its measured step time"))
    return rows


def _cost_rows(cost: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if not cost:
        return
    yield "model", f"{cost['parameters']:,} parameters, {flops(cost['flops_per_image'])} per training image"
    reached = f"{flops(cost['achieved_flops_per_s'])}/s"
    if cost["mfu"] is None:
        yield "computing", f"{reached} per rank"
        return
    peak = f"{flops(cost['peak_flops_per_s'])}/s ({cost['peak_source']})"
    yield "computing", f"{reached} per rank, an MFU of {share(cost['mfu'])} of {peak}"
    if cost["roofline_share"] is not None:
        bound = f"{cost['roofline_images_per_s']:,.0f} images/s that memory bandwidth and arithmetic allow"
        yield "roofline", f"{share(cost['roofline_share'])} of the {bound}"
