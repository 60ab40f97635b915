"""The directory of an experiment: its request, its runs, and its result.

The request is written first and the result last, so the same command resumes an unfinished experiment.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import Field, TypeAdapter, ValidationError

from paceline.core.errors import PacelineError, RecipeError
from paceline.core.experiments.results import (
    CrossValidationResult,
    LadderResult,
    LearnResult,
    LrFindResult,
    PredictionResult,
    ScaleResult,
    SweepResult,
    TuneResult,
)
from paceline.core.experiments.task_lock import write_shared
from paceline.core.json_file import read_json, read_limited
from paceline.core.run_dir import LOCK, RunDir, write_atomic

Experiment = (
    LadderResult
    | ScaleResult
    | PredictionResult
    | TuneResult
    | SweepResult
    | LrFindResult
    | LearnResult
    | CrossValidationResult
)
RESULT: Final = "experiment.json"
_REQUEST: Final = "asked.json"
_FORMER_REQUEST_KEYS: Final = ("paceline", "torch")
"""Versions, which older files hold and which are ignored; each run is checked on its own."""
_MAY_EXIST_BEFORE: Final = {LOCK, "job"}
"""Entries that a new folder may hold: the lock of a killed process, and files submitted to a scheduler."""
_ADAPTER: Final[TypeAdapter[Experiment]] = TypeAdapter(Annotated[Experiment, Field(discriminator="kind")])


@dataclass(frozen=True)
class ExperimentDir:
    """Paths of all files of an experiment."""

    path: Path

    @property
    def recipe(self) -> Path:
        """The recipe that all trials vary; `paceline train FOLDER` trains it in full."""
        return self.path / "recipe.yaml"

    @property
    def measured(self) -> Path:
        """The variant of the recipe that short runs measure, if any."""
        return self.path / "measured.yaml"

    @property
    def trials(self) -> Path:
        """The folder of runs, one folder each."""
        return self.path / "trials"

    @property
    def replaced(self) -> Path:
        """The folder of runs that were repeated because their hardware, versions or code differ."""
        return self.path / "replaced"

    @property
    def data(self) -> Path:
        """The folder of data made for trials, such as packs, which is removed at the end."""
        return self.path / "data"

    @property
    def result(self) -> Path:
        """The result as JSON, written last."""
        return self.path / RESULT

    @property
    def table(self) -> Path:
        """The result as CSV, one row per rung, number of ranks, or varied value."""
        return self.path / "table.csv"

    @property
    def points(self) -> Path:
        """Speeds over ranks as CSV, for `paceline predict-scaling --points`."""
        return self.path / "points.csv"

    @property
    def markdown(self) -> Path:
        """The result as a Markdown table."""
        return self.path / "table.md"

    @property
    def predictions(self) -> Path:
        """The predictions of a cross-validation as CSV, one row per image and repeat."""
        return self.path / "predictions.csv"

    @property
    def report(self) -> Path:
        """The report, one HTML file."""
        return self.path / "report.html"

    def write(self, result: Experiment) -> None:
        """Write the result. Raise `PacelineError` on failure."""
        try:
            write_atomic(self.result, result.model_dump_json(indent=2) + "\n")
        except OSError as error:
            raise PacelineError(f"{self.result}: cannot be written: {error.strerror} (free some room)") from None

    def read(self) -> Experiment:
        """Return the result. Raise `PacelineError` if there is none or it cannot be read."""
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
    """Return the folder of an experiment, new or unfinished with the same request.

    `name` begins the folder's name, such as `ladder-cpu`; `request` is all that its trials depend on, as JSON.
    `on_notice` gets a message on a resume. Several processes may open one `run_dir` at once. Raise `RecipeError` if it
    holds something else.
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
        temporary = f".{_REQUEST}."  # of another process that is writing the same request
        names = {each.name for each in folder.iterdir() if not each.name.startswith(temporary)}
        if names <= _MAY_EXIST_BEFORE:
            write_shared(folder / _REQUEST, json.dumps(request, indent=2) + "\n")
        elif _read_request(folder) == request:
            on_notice(f"resuming {folder}")
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
