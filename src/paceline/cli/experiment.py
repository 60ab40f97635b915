"""Open, resume and finish the folder of an experiment, for all verbs of the lab."""

import contextlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, TypeVar

from paceline.cli.telling import Begins, Say, telling
from paceline.core.console import progress_console
from paceline.core.errors import PacelineError, RecipeError
from paceline.core.experiments.folder import Experiment, ExperimentDir, open_experiment
from paceline.core.experiments.sharing import task_locked
from paceline.core.rundir import RunDir
from paceline.data.sources.places import printable
from paceline.lab.runner import interrupted_by
from paceline.lab.tasks import Task
from paceline.lab.trial import Outcome, Trial, vary
from paceline.parallel.environ import world_from_environ
from paceline.recipe.schema import Recipe

Result = TypeVar("Result", bound=Experiment)
STOPS: Final = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that interrupt an experiment like Ctrl-C; Slurm sends SIGUSR1 before the time limit."""
LIMIT_S: Final = 1800.0
"""Time limit of a short run, in seconds: settings that hang or compile for longer are not fast."""


def refuse_ranks_of_others(verb: str) -> None:
    """Raise `RecipeError` if torchrun or Slurm started this process: the verb starts its own ranks."""
    launcher = world_from_environ(os.environ).launcher
    if launcher != "single":
        fix = "start it without a launcher, with --ranks"
        raise RecipeError(f"{verb}: starts its own ranks, but {launcher} started this process ({fix})")


@contextlib.contextmanager
def experiment(name: str, request: dict[str, Any], run_dir: Path | None, *, as_json: bool) -> Iterator[ExperimentDir]:
    """Return a context that locks an experiment's folder: a new one, or one of the same request.

    Which of its runs still count is decided per run. An interrupt prints how to resume.
    """
    out = progress_console(as_json=as_json)
    folder = _open(name, request, run_dir, lambda line: print(line, file=out, flush=True))
    with RunDir(folder.path).lock(), _told_how_to_go_on(folder):
        yield folder


def files_cached_before(recipe: Recipe, on_start: Begins) -> Begins:
    """Return a callback that calls `on_start` before each trial and reads the files of `recipe` into the page cache.

    Otherwise the first run would do so for all others.
    """
    from paceline.lab.cache import set_cache

    def before(trial: Trial, repeat: int) -> None:
        on_start(trial, repeat)
        with contextlib.suppress(PacelineError):  # the run will report it
            set_cache(vary(recipe, trial.patch), is_cold=False)

    return before


def run_task(
    request: dict[str, Any],
    run_dir: Path | None,
    task: Task,
    run: Callable[[ExperimentDir, Begins, Say], Sequence[Outcome]],
    *,
    as_json: bool,
) -> int:
    """Run one task of an experiment in its shared folder, draw no conclusions, and return 0.

    `run` gets the folder, a callback for the start of each run, and one that prints a line. Nothing runs if the
    experiment has finished. Raise `RecipeError` if the folder is not named or holds something else, or if the task or
    the whole experiment is already running.
    """
    if run_dir is None:
        raise RecipeError("--task: runs in a folder that all tasks share (add --run-dir DIR)")
    folder = _open("", request, run_dir, lambda line: None)
    outcomes: Sequence[Outcome] = ()
    out = progress_console(as_json=as_json)
    with (
        task_locked(folder.path, task.number),
        _told_how_to_go_on(folder),
        interrupted_by(*STOPS),
        telling(out) as (on_start, print_line),
    ):
        if folder.result.exists():
            print_line(f"{folder.path}: has finished, so task {task.number} is not run")
        else:
            outcomes = run(folder, on_start, print_line)
    if as_json:
        runs = [each.rundir.path.relative_to(folder.path).as_posix() for each in outcomes if each.result is not None]
        print(json.dumps({"task": task.number, "what": task.what, "runs": runs}, indent=2))
    return 0


def _open(name: str, request: dict[str, Any], run_dir: Path | None, print_line: Say) -> ExperimentDir:
    # A run that stops early at the end of the job would count as failed; the job's signal stops the whole experiment.
    os.environ["PACELINE_END_TIME"] = ""
    return open_experiment(name, request, run_dir, datetime.now().astimezone(), print_line)


@contextlib.contextmanager
def _told_how_to_go_on(folder: ExperimentDir) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        print(f"stopped: run the same command to resume {printable(folder.path)}", file=sys.stderr)
        raise


def found_before(folder: ExperimentDir, kind: type[Result]) -> Result | None:
    """Return the result of an experiment that finished earlier, else None."""
    result = folder.read() if folder.result.exists() else None
    return result if isinstance(result, kind) else None


def leave(folder: ExperimentDir, result: Experiment) -> None:
    """Write tables, result and report, and remove generated data. The result file marks the experiment as complete."""
    from paceline.cli.report import leave_report
    from paceline.report.experiments.tables import write_tables

    shutil.rmtree(folder.data, ignore_errors=True)
    write_tables(folder, result)
    folder.write(result)
    leave_report(RunDir(folder.path))
