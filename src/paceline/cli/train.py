"""`paceline train`: read the words, start ranks if nobody else did, and run this one."""

import json
import os
import sys
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from paceline.cli.ranks import enter_world, ranks_to_start, start_ranks
from paceline.cli.started import STARTED_S
from paceline.cli.words import split_words
from paceline.core.errors import RecipeError, WorldError
from paceline.core.process import ignore_stop_signals
from paceline.core.results import RunResult
from paceline.core.rundir import RunDir
from paceline.core.world import World
from paceline.data.sources.places import printable
from paceline.parallel.environ import batch_job, count_gpus, launch_name
from paceline.parallel.launch import PREEMPTED
from paceline.recipe.load import DEFAULT, RUN_RECIPE, Loaded, load
from paceline.recipe.plan import divide_batch
from paceline.train.code_note import tell_code

if TYPE_CHECKING:
    from paceline.train.interrupt import Interrupts


def train(
    words: list[str],
    ranks: str,
    run_dir: Path | None,
    *,
    resume: bool,
    dry_run: bool,
    max_restarts: int,
    port: int,
    as_json: bool,
) -> int:
    """Do what `paceline train` was asked for; return the exit code."""
    name, patch = split_words(words)
    if resume:
        name = resumed(name, run_dir)
    loaded = load(name, patch)
    world = enter_world()
    if resume and ranks == "auto" and world.launcher == "single":
        ranks = _ranks_before((run_dir or Path(name)).expanduser())
    num_ranks = ranks_to_start(ranks, world, loaded.recipe)
    if max_restarts and world.launcher in ("torchrun", "slurm"):
        fix = "torchrun --max-restarts" if world.launcher == "torchrun" else "sbatch --requeue"
        raise WorldError(f"--max-restarts: {max_restarts}, but the ranks were started by {world.launcher} (use {fix})")
    divide_batch(loaded.recipe, num_ranks)
    if dry_run:
        from paceline.cli.dry_run import dry_run as show

        return show(loaded, world, num_ranks, as_json=as_json)
    rundir = choose_rundir(name, loaded, run_dir, world, resume=resume)
    try:
        if world.launcher == "single" and (num_ranks > 1 or max_restarts):
            grace_s = loaded.recipe.checkpoint.grace.seconds
            extra = ["--run-dir", str(rundir.path)]
            if world.may_be_again and not resume and _is_of_this_launch(rundir):
                extra.append("--resume")
            return start_ranks(num_ranks, port, extra, grace_s=grace_s, max_restarts=max_restarts)
        return _train_here(loaded, world, rundir, resume=resume, as_json=as_json)
    finally:
        if run_dir is None:
            rundir.give_back()


def resumed(name: str, run_dir: Path | None) -> str:
    """Return the run that is gone on with, in place of its recipe's name; without a folder it is the newest of these.

    Raise `RecipeError` when there is none.
    """
    if run_dir is not None:
        is_run = name == DEFAULT and (run_dir.expanduser() / RUN_RECIPE).is_file()
        return str(run_dir) if is_run else name
    if (Path(name).expanduser() / RUN_RECIPE).is_file():
        return name
    recipe_name = load(name).name
    newest = RunDir.newest_of(recipe_name)
    if newest is None:
        raise RecipeError(f"--resume: runs/ has no run of {recipe_name} (write paceline train RUN --resume)")
    return str(newest.path)


def _ranks_before(run: Path) -> str:
    """Return how many ranks the run to resume had, which it goes on with unless told otherwise."""
    try:
        return str(json.loads((run / "plan.json").read_text(encoding="utf-8"))["world_size"])
    except (OSError, ValueError, KeyError, TypeError):
        return "auto"


def choose_rundir(name: str, loaded: Loaded, run_dir: Path | None, world: World, *, resume: bool) -> RunDir:
    """Return where to write: as told, or the run that is resumed, or a new folder under `runs/`.

    Ranks that were started again by torchrun or Slurm go on with the run that this launch has begun.
    """
    if run_dir is not None:
        return RunDir(run_dir.expanduser())
    if resume and (Path(name).expanduser() / RUN_RECIPE).is_file():
        return RunDir(Path(name).expanduser())
    if not world.is_main:
        return RunDir(Path("runs"))  # until rank 0 says which
    ours = RunDir.newest_of(loaded.name, _is_of_this_launch) if world.may_be_again else None
    return ours or RunDir.claim(loaded.name, datetime.now().astimezone())


def _launch() -> str:
    return launch_name(os.environ, os.getppid(), os.uname().nodename)


def _is_of_this_launch(rundir: RunDir) -> bool:
    from paceline.train.resume import is_of_launch

    return is_of_launch(rundir, _launch())


def _train_here(loaded: Loaded, world: World, rundir: RunDir, *, resume: bool, as_json: bool) -> int:
    from paceline.train.interrupt import Interrupts

    with Interrupts() as interrupts:  # importing torch takes seconds, in which a signal may come
        from paceline.cli.show import show_result

        out = sys.stderr if as_json else sys.stdout
        asked = Asked(STARTED_S, ("paceline", *sys.argv[1:]), out, resume)
        result = run_here(loaded, world, rundir, interrupts, asked)
        if world.is_main:
            show_result(result, rundir, loaded, as_json=as_json)
        if result.status == "preempted":
            ignore_stop_signals()
            return PREEMPTED
    return 0


@dataclass(frozen=True)
class Asked:
    """How a run was asked for: when, in which words, where its progress is told, and whether it is to go on."""

    started_s: float
    words: tuple[str, ...]
    out: TextIO
    resume: bool


def run_here(loaded: Loaded, world: World, rundir: RunDir, interrupts: "Interrupts", asked: Asked) -> RunResult:
    """Train as this rank, telling how far it is, and leave the report; `interrupts` have been entered."""
    from paceline.cli.progress import build_progress
    from paceline.cli.report import leave_report
    from paceline.parallel.flight_recorder import flight_recorder_environ
    from paceline.train.job import Invocation
    from paceline.train.resume import finished
    from paceline.train.run import run

    if count_gpus(os.environ):
        for variable, value in flight_recorder_environ(rundir.path).items():
            os.environ.setdefault(variable, value)
    was_complete = asked.resume and world.is_main and finished(rundir) is not None
    if world.is_main and not was_complete:
        tell_code(loaded)
    listeners = [build_progress(asked.out)] if world.is_main else []
    in_job = batch_job(os.environ)
    invocation = Invocation(asked.started_s, asked.words, listeners, _launch(), interrupts, in_job)
    result = run(loaded.recipe, world, rundir, resume=asked.resume, invocation=invocation)
    if was_complete:
        print(f"{printable(rundir.path)}: was complete already, and nothing was done", file=asked.out, flush=True)
    has_time = result.status != "preempted"
    has_report = was_complete and rundir.report.is_file()
    if world.is_main and loaded.recipe.log.report == "on" and has_time and not has_report:
        leave_report(rundir)
    return result
