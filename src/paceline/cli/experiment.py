"""What the lab's verbs have in common: the folder of an experiment is opened, gone on with, and left in one way."""

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, TypeVar

from paceline import __version__
from paceline.core.errors import RecipeError
from paceline.core.experiments.folder import Experiment, ExperimentDir, open_experiment
from paceline.core.rundir import RunDir
from paceline.parallel.environ import world_from_environ

Result = TypeVar("Result", bound=Experiment)
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

    Runs of another version of paceline or of torch are not gone on with. Whoever interrupts is told how to go on.
    """
    out = sys.stderr if as_json else sys.stdout
    versions = {"paceline": __version__, "torch": version("torch")}
    now = datetime.now().astimezone()
    folder = open_experiment(name, {**asked, **versions}, run_dir, now, lambda line: print(line, file=out, flush=True))
    with RunDir(folder.path).lock():
        try:
            yield folder
        except KeyboardInterrupt:
            print(f"stopped: the same command goes on with {folder.path}", file=sys.stderr)
            raise


def found_before(folder: ExperimentDir, kind: type[Result]) -> Result | None:
    """Return what the experiment came to, where it has ended before."""
    found = folder.read() if folder.result.exists() else None
    return found if isinstance(found, kind) else None


def leave(folder: ExperimentDir, result: Experiment) -> None:
    """Write tables, the result, which says that all is there, and the report; remove the data that were made."""
    from paceline.cli.report import leave_report
    from paceline.report.experiments import write_tables

    shutil.rmtree(folder.data, ignore_errors=True)
    write_tables(folder, result)
    folder.write(result)
    leave_report(RunDir(folder.path))
