"""`paceline train`: choose the run directory, start ranks if no launcher did, and train."""

import contextlib
import os
import time
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from paceline.cli.args import split_recipe_args
from paceline.cli.options import TrainOptions
from paceline.cli.ranks import enter_world, ranks_to_start, start_ranks, typed_command
from paceline.cli.start_line import WaitNotes, starting_message
from paceline.cli.start_time import START_TIME_S
from paceline.core.console import progress_console
from paceline.core.errors import CheckpointError, PacelineError, RecipeError, WorldError
from paceline.core.imports import fast_imports
from paceline.core.process import ignore_stop_signals
from paceline.core.results import RunResult
from paceline.core.run_dir import RunDir, is_run
from paceline.core.world import World
from paceline.data.files import printable
from paceline.models.weights_recipe import with_cached_weights_defaults, with_run_defaults, with_weights_defaults
from paceline.parallel.environ import batch_job, count_gpus, launch_name
from paceline.parallel.launch import PREEMPTED
from paceline.recipe.consent import require_consent
from paceline.recipe.load import DEFAULT, LoadedRecipe, load
from paceline.recipe.plan import divide_batch, resolve_batch, smallest_batch

if TYPE_CHECKING:
    from paceline.core.interrupts import Interrupts


def train(options: TrainOptions) -> int:
    """Run `paceline train`, and return the exit code."""
    run_dir, as_json = options.run_dir, options.as_json
    if not options.dry_run:
        progress_console(as_json=as_json)  # a process that starts ranks must survive a lost console too
    name, patch = split_recipe_args(options.args)
    if options.resume:
        name = find_run_to_resume(name, run_dir)
    loaded, weights_note = _add_weights_defaults(load(name, patch), run_dir or Path(name), options)
    require_consent(loaded, trust_code=options.trust_code)
    world = enter_world()
    # The default is the run's own number of ranks.
    ranks = options.ranks
    if options.resume and ranks == "auto" and world.launcher == "single":
        before = RunDir((run_dir or Path(name)).expanduser())
        ranks = str(before.read_plan().get("world_size", "auto"))
    num_ranks = ranks_to_start(ranks, world, loaded.recipe.parallel, oversubscribe=options.oversubscribe)
    max_restarts = options.max_restarts
    if max_restarts and world.launcher in ("torchrun", "slurm"):
        fix = "torchrun --max-restarts" if world.launcher == "torchrun" else "sbatch --requeue"
        raise WorldError(f"--max-restarts: {max_restarts}, but the ranks were started by {world.launcher} (use {fix})")
    divide_batch(smallest_batch(loaded.recipe, num_ranks), num_ranks)
    if options.dry_run:
        from paceline.cli.dry_run import dry_run as show

        resumed_run = RunDir((run_dir or Path(name)).expanduser()) if options.resume else None
        return show(loaded, world, num_ranks, as_json=as_json, resumed=resumed_run, weights_note=weights_note)
    rundir = choose_rundir(name, loaded, run_dir, world, resume=options.resume)
    try:
        if world.launcher == "single" and not as_json:  # with --json, an error is the only line on stderr
            out = progress_console(as_json=False)
            print(starting_message(num_ranks, loaded.recipe.parallel.device), file=out, flush=True)
        if world.launcher == "single" and (num_ranks > 1 or max_restarts):
            grace_s = loaded.recipe.checkpoint.grace.seconds
            extra = [] if run_dir is not None else ["--run-dir", str(rundir.path)]
            # A launcher has restarted this process: continue the run that it began.
            if world.may_be_restarted and not options.resume and _is_from_this_launch(rundir):
                extra.append("--resume")
            return start_ranks(num_ranks, options.port, extra, grace_s=grace_s, max_restarts=max_restarts)
        return _train_rank(loaded, world, rundir, options)
    finally:
        if run_dir is None:
            rundir.release()


def _add_weights_defaults(loaded: LoadedRecipe, run: Path, options: TrainOptions) -> tuple[LoadedRecipe, str]:
    """Return `loaded` with the preprocessing of its weights, and a note if a dry run would have to download it."""
    if options.resume:
        loaded = with_run_defaults(loaded, run.expanduser())
    return with_cached_weights_defaults(loaded) if options.dry_run else (with_weights_defaults(loaded), "")


def find_run_to_resume(name: str, run_dir: Path | None) -> str:
    """Return the run to resume; without `run_dir`, the newest run of the recipe.

    Raise `RecipeError` if there is none.
    """
    if run_dir is not None:
        return str(run_dir) if name == DEFAULT and is_run(run_dir.expanduser()) else name
    if is_run(Path(name).expanduser()):
        return name
    recipe_name = load(name).name
    newest = RunDir.newest_of(recipe_name)
    if newest is None:
        raise RecipeError(f"--resume: runs/ has no run of {recipe_name} (write paceline train RUN --resume)")
    return str(newest.path)


def choose_rundir(name: str, loaded: LoadedRecipe, run_dir: Path | None, world: World, *, resume: bool) -> RunDir:
    """Return `run_dir`, the run to resume, or a new folder under `runs/`.

    Ranks that torchrun or Slurm restarts continue the run that this launch began.
    """
    if run_dir is not None:
        return RunDir(run_dir.expanduser())
    if resume and is_run(Path(name).expanduser()):
        return RunDir(Path(name).expanduser())
    if not world.is_main:
        return RunDir(Path("runs"))  # until rank 0 broadcasts it
    ours = RunDir.newest_of(loaded.name, _is_from_this_launch) if world.may_be_restarted else None
    return ours or RunDir.claim(loaded.name, datetime.now().astimezone())


def _launch_id() -> str:
    return launch_name(os.environ, os.getppid(), os.uname().nodename)


def _is_from_this_launch(rundir: RunDir) -> bool:
    from paceline.training.resume import was_started_by

    return was_started_by(rundir, _launch_id())


def _train_rank(loaded: LoadedRecipe, world: World, rundir: RunDir, options: TrainOptions) -> int:
    from paceline.core.interrupts import Interrupts

    with Interrupts(announces=world.is_main) as interrupts:  # importing torch takes seconds: handle signals before
        out = progress_console(as_json=options.as_json)
        request = TrainRequest(START_TIME_S, typed_command(world), out, options.resume, has_notes=not options.as_json)
        result = run_rank(loaded, world, rundir, interrupts, request)
        if world.is_main:
            show_result(result, rundir, as_json=options.as_json, verbose=options.verbose)
        ignore_stop_signals()  # the result is written: a late signal must not change the exit code
        if result.status == "failed":
            return _exit_unsaved(result, rundir, world)
    return PREEMPTED if result.status == "preempted" else 0


def show_result(result: RunResult, rundir: RunDir, *, as_json: bool, verbose: bool = False) -> None:
    """Print the result of a run and its run directory: in a few lines, or in full if `verbose`."""
    from paceline.cli.tables import print_outcome, print_run_dir
    from paceline.report.read_run import read_run_facts
    from paceline.report.render_terminal import print_page
    from paceline.report.run_brief import run_brief
    from paceline.report.run_page import build_run_summary
    from paceline.report.run_summary import ATTRIBUTED

    if as_json:
        print(result.model_dump_json(indent=2))
        return
    run = replace(read_run_facts(rundir), result=result)
    page = build_run_summary(run)
    if verbose:
        # The row of the wall clock names what is not attributed.
        print_page(replace(page, figures=[each for each in page.figures if each.label != ATTRIBUTED]))
        print_run_dir(rundir)
    else:
        print()
        print_outcome(run_brief(run, page))


def _exit_unsaved(result: RunResult, rundir: RunDir, world: World) -> int:
    from paceline.training.resume import describe_unsaved_weights

    if world.is_main:
        raise CheckpointError(describe_unsaved_weights(rundir, result))
    return CheckpointError.exit_code


@dataclass(frozen=True)
class TrainRequest:
    """How a run was started; progress goes to `out`, and with `has_notes` what a long start waits for."""

    started_s: float
    command: tuple[str, ...]
    out: TextIO
    resume: bool
    has_notes: bool = True


def run_rank(
    loaded: LoadedRecipe, world: World, rundir: RunDir, interrupts: "Interrupts", request: TrainRequest
) -> RunResult:
    """Train as this rank, print progress, and write the report; `interrupts` must be active."""
    with WaitNotes(request.out if world.is_main and request.has_notes else None) as notes:
        return _run_rank(loaded, world, rundir, interrupts, request, notes)


def _run_rank(
    loaded: LoadedRecipe,
    world: World,
    rundir: RunDir,
    interrupts: "Interrupts",
    request: TrainRequest,
    notes: WaitNotes,
) -> RunResult:
    with fast_imports():
        from paceline.cli.notebook import build_progress
        from paceline.parallel.launch import flight_recorder_environ
        from paceline.training.process import Invocation, ProgressReporter
        from paceline.training.resume import read_final_result
        from paceline.training.run import run

    if count_gpus(os.environ):
        for variable, value in flight_recorder_environ(rundir.path).items():
            os.environ.setdefault(variable, value)
    was_ended = (
        world.is_main
        and (request.resume or world.may_be_restarted)
        and read_final_result(rundir, loaded.recipe.train.max_time) is not None
    )
    was_complete = request.resume and was_ended
    position = ProgressReporter()
    notes.follow(lambda: position.doing)
    listeners = [build_progress(request.out, position, before_start=notes.close)] if world.is_main else []
    invocation = Invocation(
        request.started_s,
        request.command,
        listeners,
        recipe_name=loaded.name,
        changes=loaded.changes() if world.is_main else (),
        launch=_launch_id(),
        interrupts=interrupts,
        batch_job=batch_job(os.environ),
        progress=position,
    )
    recipe = loaded.recipe
    # Otherwise `run` keeps the batch size that the run had, whatever the number of ranks is now.
    if request.resume and loaded.is_from_command_line("data.rank_batch_size"):
        recipe = resolve_batch(recipe, world.world_size)
    result = run(recipe, world, rundir, resume=request.resume, invocation=invocation)
    if was_complete:
        is_complete = result.status != "time_reached"
        why = "was already complete, so nothing was done"
        why = why if is_complete else "its time is up, so nothing was done (set train.max_time=...)"
        print(f"{printable(rundir.path)}: {why}", file=request.out, flush=True)
    has_time = result.status != "preempted"
    has_report = was_complete and rundir.report.is_file()
    is_new = world.is_main and has_time and not was_ended
    if is_new:
        result = _update_account(result, rundir, request)  # so that the report has it
    if world.is_main and loaded.recipe.log.report == "on" and has_time and not has_report:
        from paceline.cli.report import try_write_report  # not before the first step

        try_write_report(rundir)
        if is_new:
            result = _update_account(result, rundir, request)
    return result


def _update_account(result: RunResult, rundir: RunDir, request: TrainRequest) -> RunResult:
    """Extend the result's account to now, and write it; rank 0 only."""
    if result.account is None:
        return result
    closed = result.model_copy(update={"account": result.account.closed(time.perf_counter() - request.started_s)})
    with contextlib.suppress(PacelineError):  # on a full disk the result keeps its account
        rundir.write_result(closed)
    return closed
