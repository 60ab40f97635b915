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

from paceline.cli.progress_output import OnRunStart, PrintLine, progress_output
from paceline.core.console import progress_console
from paceline.core.errors import PacelineError, RecipeError
from paceline.core.experiments.experiment_dir import Experiment, ExperimentDir, open_experiment
from paceline.core.experiments.results import RungResult, ScalePoint
from paceline.core.experiments.task_lock import lock_task
from paceline.core.run_dir import RunDir
from paceline.data.files import printable
from paceline.lab.repeat import ArrayTask
from paceline.lab.runner import interrupt_on_signals
from paceline.lab.trial import Trial, TrialOutcome, apply_patch
from paceline.parallel.environ import world_from_environ
from paceline.recipe.schema import Recipe

ResultT = TypeVar("ResultT", bound=Experiment)
RowT = TypeVar("RowT", RungResult, ScalePoint)
STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that interrupt an experiment like Ctrl-C; Slurm sends SIGUSR1 before the time limit."""
RUN_TIMEOUT_S: Final = 1800.0
"""Time limit of a short run, in seconds: settings that hang or compile for longer are not fast."""


def refuse_launcher(verb: str) -> None:
    """Raise `RecipeError` if torchrun or Slurm started this process: `verb` starts its own ranks."""
    launcher = world_from_environ(os.environ).launcher
    if launcher != "single":
        fix = "start it without a launcher, with --ranks"
        raise RecipeError(f"{verb}: starts its own ranks, but {launcher} started this process ({fix})")


@contextlib.contextmanager
def locked_experiment(
    name: str, request: dict[str, Any], run_dir: Path | None, *, as_json: bool
) -> Iterator[ExperimentDir]:
    """Return a context that locks an experiment's folder: a new one, or an unfinished one of the same request.

    An interrupt prints how to resume.
    """
    out = progress_console(as_json=as_json)
    folder = _open_folder(name, request, run_dir, lambda line: print(line, file=out, flush=True))
    # Which of its runs still count is decided per run, by `ReusePolicy`.
    with RunDir(folder.path).lock(), _print_resume_hint(folder):
        yield folder


def warm_cache_before(recipe: Recipe, on_start: OnRunStart) -> OnRunStart:
    """Return a callback that calls `on_start`, then reads the files of `recipe` into the page cache."""
    from paceline.lab.page_cache import prepare_page_cache

    def before(trial: Trial, repeat: int) -> None:
        on_start(trial, repeat)
        # Otherwise the first run would read the files from disk, and all others from memory.
        with contextlib.suppress(PacelineError):  # the run will report it
            prepare_page_cache(apply_patch(recipe, trial.patch), is_cold=False)

    return before


def run_task(
    request: dict[str, Any],
    run_dir: Path | None,
    task: ArrayTask,
    run: Callable[[ExperimentDir, OnRunStart, PrintLine], Sequence[TrialOutcome]],
    *,
    as_json: bool,
) -> int:
    """Run one task of an experiment in its shared folder, without a conclusion, and return 0.

    `run` gets the folder, a callback for the start of each run, and one that prints a line. A finished experiment
    runs nothing. Raise `RecipeError` if the folder is not named or holds something else, or if the task or the
    whole experiment is running.
    """
    if run_dir is None:
        raise RecipeError("--task: runs in a folder that all tasks share (add --run-dir DIR)")
    folder = _open_folder("", request, run_dir, lambda line: None)
    outcomes: Sequence[TrialOutcome] = ()
    out = progress_console(as_json=as_json)
    with (
        lock_task(folder.path, task.number),
        _print_resume_hint(folder),
        interrupt_on_signals(*STOP_SIGNALS),
        progress_output(out) as (on_start, print_line),
    ):
        if folder.result.exists():
            print_line(f"{folder.path}: has finished, so task {task.number} is not run")
        else:
            outcomes = run(folder, on_start, print_line)
    if as_json:
        runs = [each.rundir.path.relative_to(folder.path).as_posix() for each in outcomes if each.result is not None]
        print(json.dumps({"task": task.number, "what": task.description, "runs": runs}, indent=2))
    return 0


def _open_folder(name: str, request: dict[str, Any], run_dir: Path | None, print_line: PrintLine) -> ExperimentDir:
    # A run that stops early at the end of the job would count as failed; the job's signal stops the whole experiment.
    os.environ["PACELINE_END_TIME"] = ""
    return open_experiment(name, request, run_dir, datetime.now().astimezone(), print_line)


@contextlib.contextmanager
def _print_resume_hint(folder: ExperimentDir) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        print(f"stopped: run the same command to resume {printable(folder.path)}", file=sys.stderr)
        raise


def read_finished(folder: ExperimentDir, kind: type[ResultT]) -> ResultT | None:
    """Return the result of an experiment that finished earlier, else None."""
    result = folder.read() if folder.result.exists() else None
    return result if isinstance(result, kind) else None


def finish_experiment(folder: ExperimentDir, result: Experiment) -> None:
    """Write tables, result and report, and remove generated data."""
    from paceline.cli.report import try_write_report
    from paceline.report.experiment_tables import write_tables

    shutil.rmtree(folder.data, ignore_errors=True)
    write_tables(folder, result)
    # Last but the report: the result file marks the experiment as complete.
    folder.write(result)
    try_write_report(RunDir(folder.path))


def with_steps_time(row: RowT, num_steps: int) -> RowT:
    """Return a rung or a point of a scaling with the time of all counted steps."""
    return row if row.step_s is None else row.model_copy(update={"steps_s": num_steps * row.step_s})


def show_experiment(result: Experiment, folder: ExperimentDir, *, as_json: bool) -> None:
    """Print the summary of an experiment's report, and its folder."""
    if as_json:
        print(result.model_dump_json(indent=2))
        return
    from paceline.report.experiment_tables import build_experiment_page
    from paceline.report.render_terminal import print_page

    print_page(build_experiment_page(folder, result))
    print(f"folder: {printable(folder.path)}")
    if folder.report.is_file():
        print(f"report: {printable(folder.report)}")
