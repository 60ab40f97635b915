"""The folder of an experiment: what was asked, the runs it is made of, and what they came to.

Unlike a run it is gone on with by asking for the same again: what was asked is written first, and the result last.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import Field, TypeAdapter, ValidationError

from paceline.core.errors import PacelineError, RecipeError
from paceline.core.experiments.results import LadderResult, PredictionResult, ScaleResult, SweepResult, TuneResult
from paceline.core.experiments.task_lock import write_shared
from paceline.core.json_file import read_json, read_limited
from paceline.core.run_dir import LOCK, RunDir, write_atomic

Experiment = LadderResult | ScaleResult | PredictionResult | TuneResult | SweepResult
RESULT: Final = "experiment.json"
_REQUEST: Final = "asked.json"
_FORMER_REQUEST_KEYS: Final = ("paceline", "torch")
"""Versions, which this file had: whether a run of another version counts is judged run by run."""
_MAY_EXIST_BEFORE: Final = {LOCK, "job"}
"""What may lie in a new folder: a lock that a kill has left, and what was submitted to a scheduler."""
_ADAPTER: Final[TypeAdapter[Experiment]] = TypeAdapter(Annotated[Experiment, Field(discriminator="kind")])


@dataclass(frozen=True)
class ExperimentDir:
    """Where everything an experiment writes is found."""

    path: Path

    @property
    def recipe(self) -> Path:
        """The recipe that all trials vary, which `paceline train FOLDER` trains as a whole."""
        return self.path / "recipe.yaml"

    @property
    def measured(self) -> Path:
        """The form of the recipe that short runs measure, where there are such."""
        return self.path / "measured.yaml"

    @property
    def trials(self) -> Path:
        """The folder of runs, one folder each."""
        return self.path / "trials"

    @property
    def replaced(self) -> Path:
        """The folder of runs that were made again, as they were of other hardware, versions or code."""
        return self.path / "replaced"

    @property
    def data(self) -> Path:
        """The folder of data that were made for trials, such as packs; it goes when the experiment has ended."""
        return self.path / "data"

    @property
    def result(self) -> Path:
        """What the experiment came to, as JSON; it is written last."""
        return self.path / RESULT

    @property
    def table(self) -> Path:
        """The same as CSV, one row a rung, a number of ranks, or whatever was varied."""
        return self.path / "table.csv"

    @property
    def markdown(self) -> Path:
        """The same as a table to paste."""
        return self.path / "table.md"

    @property
    def report(self) -> Path:
        """The report, one HTML file."""
        return self.path / "report.html"

    def write(self, result: Experiment) -> None:
        """Write what it came to. Raise `PacelineError` when it cannot be."""
        try:
            write_atomic(self.result, result.model_dump_json(indent=2) + "\n")
        except OSError as error:
            raise PacelineError(f"{self.result}: cannot be written: {error.strerror} (free some room)") from None

    def read(self) -> Experiment:
        """Return what it came to. Raise `PacelineError` when there is no result or it cannot be read."""
        try:
            return _ADAPTER.validate_json(read_limited(self.result))
        except FileNotFoundError:
            raise PacelineError(
                f"{self.path}: has no {RESULT} (the experiment has not ended: start it again)"
            ) from None
        except (OSError, ValidationError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise PacelineError(
                f"{self.result}: cannot be read: {reason} (remove it, and give the same command again)"
            ) from None


def open_experiment(
    name: str, request: dict[str, Any], run_dir: Path | None, now: datetime, on_notice: Callable[[str], None]
) -> ExperimentDir:
    """Return the folder of an experiment: one that asked for the same and has not ended is gone on with.

    `name` begins its folder's, such as `ladder-cpu`; `request` is all that its trials depend on, as JSON has it.
    `on_notice` hears that one is gone on with. Several processes may open one `run_dir` at once. Raise `RecipeError`
    where it holds something else.
    """
    if run_dir is None:
        known = RunDir.newest_of(name, lambda run: _is_unfinished(run.path, request))
        folder = known.path if known else RunDir.claim(name, now).path
    else:
        folder = run_dir.expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        opened = ExperimentDir(folder)
        for each in (opened.trials, opened.replaced, opened.data, folder / "job"):
            if each.is_symlink():
                raise RecipeError(f"--run-dir: {each} is a link, and nothing is written through links (name another)")
        begun = f".{_REQUEST}."  # by another process, which is about to name it
        names = {each.name for each in folder.iterdir() if not each.name.startswith(begun)}
        if names <= _MAY_EXIST_BEFORE:
            write_shared(folder / _REQUEST, json.dumps(request, indent=2) + "\n")
        elif _read_request(folder) == request:
            on_notice(f"going on with {folder}")
        else:
            raise RecipeError(f"--run-dir: {folder} holds something else (name a new folder)")
    except OSError as error:
        raise RecipeError(f"--run-dir: {folder} cannot be used: {error.strerror} (name another)") from None
    return opened


def _is_unfinished(folder: Path, request: dict[str, Any]) -> bool:
    return not (folder / RESULT).exists() and _read_request(folder) == request


def _read_request(folder: Path) -> object:
    try:
        found = read_json(folder / _REQUEST)
    except (OSError, ValueError):
        return None
    if not isinstance(found, dict):
        return None
    return {key: value for key, value in found.items() if key not in _FORMER_REQUEST_KEYS}
