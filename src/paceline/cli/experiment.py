"""What the lab's verbs have in common: the folder of an experiment is opened, gone on with, and left in one way."""

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
"""Signals that interrupt an experiment as Ctrl-C does; the last is what Slurm is told to send before the time is up."""
LIMIT_S: Final = 1800.0
"""Longest that a short run may take: settings that hang, or compile for longer, are not fast ones."""


def refuse_ranks_of_others(verb: str) -> None:
    """Raise `RecipeError` where torchrun or Slurm has started this process, for a verb that starts ranks of its own."""
    launcher = world_from_environ(os.environ).launcher
    if launcher != "single":
        fix = "start it without, with --ranks"
        raise RecipeError(f"{verb}: starts ranks of its own, and {launcher} has started these ({fix})")


@contextlib.contextmanager
def experiment(name: str, asked: dict[str, Any], run_dir: Path | None, *, as_json: bool) -> Iterator[ExperimentDir]:
    """Return the context in which an experiment's folder is ours: a new one, or one that asked for the same.

    Which of its runs still count is judged run by run. Whoever interrupts is told how to go on.
    """
    out = progress_console(as_json=as_json)
    folder = _open(name, asked, run_dir, lambda line: print(line, file=out, flush=True))
    with RunDir(folder.path).lock(), _told_how_to_go_on(folder):
        yield folder


def files_cached_before(recipe: Recipe, begins: Begins) -> Begins:
    """Return what a runner calls before each trial of `recipe`: `begins`, and its files are read into memory.

    Without that the first run would read them for all others.
    """
    from paceline.lab.cache import set_cache

    def before(trial: Trial, repeat: int) -> None:
        begins(trial, repeat)
        with contextlib.suppress(PacelineError):  # which the run tells itself
            set_cache(vary(recipe, trial.patch), is_cold=False)

    return before


def run_task(
    asked: dict[str, Any],
    run_dir: Path | None,
    task: Task,
    run: Callable[[ExperimentDir, Begins, Say], Sequence[Outcome]],
    *,
    as_json: bool,
) -> int:
    """Do a part of an experiment in the folder that all parts share, beside others, and judge nothing; return 0.

    `run` does it: it is given the folder, what is to be called as each run begins, and what says a line. Nothing is run
    where the experiment has ended. Raise `RecipeError` where the folder is not named, or holds something else, and
    where the task, or the whole experiment, is being run.
    """
    if run_dir is None:
        raise RecipeError("--task: is a part of an experiment whose folder all parts share (add --run-dir DIR)")
    folder = _open("", asked, run_dir, lambda line: None)
    outcomes: Sequence[Outcome] = ()
    out = progress_console(as_json=as_json)
    with (
        task_locked(folder.path, task.number),
        _told_how_to_go_on(folder),
        interrupted_by(*STOPS),
        telling(out) as (begins, say),
    ):
        if folder.result.exists():
            say(f"{folder.path}: has ended, so task {task.number} is not run")
        else:
            outcomes = run(folder, begins, say)
    if as_json:
        runs = [each.rundir.path.relative_to(folder.path).as_posix() for each in outcomes if each.result is not None]
        print(json.dumps({"task": task.number, "what": task.what, "runs": runs}, indent=2))
    return 0


def _open(name: str, asked: dict[str, Any], run_dir: Path | None, told: Say) -> ExperimentDir:
    # A run that left early because the job ends soon would count as failed; the job's signal ends the whole experiment.
    os.environ["PACELINE_END_TIME"] = ""
    return open_experiment(name, asked, run_dir, datetime.now().astimezone(), told)


@contextlib.contextmanager
def _told_how_to_go_on(folder: ExperimentDir) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        print(f"stopped: the same command goes on with {printable(folder.path)}", file=sys.stderr)
        raise


def found_before(folder: ExperimentDir, kind: type[Result]) -> Result | None:
    """Return what the experiment came to, where it has ended before."""
    found = folder.read() if folder.result.exists() else None
    return found if isinstance(found, kind) else None


def leave(folder: ExperimentDir, result: Experiment) -> None:
    """Write tables, the result, which says that all is there, and the report; remove the data that were made."""
    from paceline.cli.report import leave_report
    from paceline.report.experiments.tables import write_tables

    shutil.rmtree(folder.data, ignore_errors=True)
    write_tables(folder, result)
    folder.write(result)
    leave_report(RunDir(folder.path))
