"""The run directory: one folder a run, the only thing its two halves share."""

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from paceline.core.class_table import ClassCount, ClassTable, classes_csv, confusion_csv, read_classes_csv
from paceline.core.errors import PacelineError, RecipeError
from paceline.core.results import RunResult


def write_atomic(path: Path, text: str) -> None:
    """Write `text` beside `path` and move it into place, so that no reader ever sees half a file."""
    beside = path.with_name(f".{path.name}.tmp")
    with beside.open("w", encoding="utf-8", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


@dataclass(frozen=True)
class RunDir:
    """Where everything a run writes is found."""

    path: Path

    @classmethod
    def claim(cls, recipe_name: str, now: datetime) -> "RunDir":
        """Make a new folder `runs/RECIPE-TIME` and return it; a number is added when another run has the second."""
        stem = Path("runs") / f"{recipe_name}-{now:%Y%m%d-%H%M%S}"
        for path in (stem, *(stem.with_name(f"{stem.name}-{number}") for number in range(2, 1000))):
            try:
                path.mkdir(parents=True)
            except FileExistsError:
                continue
            except OSError as error:
                raise RecipeError(f"{path}: cannot be made: {error.strerror} (name another with --run-dir)") from None
            return cls(path)
        raise RecipeError(f"{stem}: so many runs in one second cannot be told apart (name one with --run-dir)")

    def give_back(self) -> None:
        """Remove a claimed folder that nothing was written to."""
        with contextlib.suppress(OSError):
            self.path.rmdir()
            self.path.parent.rmdir()

    @property
    def recipe(self) -> Path:
        """The resolved recipe."""
        return self.path / "recipe.yaml"

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints, one folder each."""
        return self.path / "checkpoints"

    @property
    def steps(self) -> Path:
        """One JSON line a logged step."""
        return self.path / "steps.jsonl"

    @property
    def evals(self) -> Path:
        """One JSON line an evaluation."""
        return self.path / "evals.jsonl"

    @property
    def metrics(self) -> Path:
        """One CSV row an evaluation."""
        return self.path / "metrics.csv"

    @property
    def classes(self) -> Path:
        """One CSV row a class, of the last evaluation."""
        return self.path / "classes.csv"

    @property
    def confusion(self) -> Path:
        """The confusion matrix of the last evaluation, as CSV."""
        return self.path / "confusion.csv"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard's event files."""
        return self.path / "tensorboard"

    def samples(self, rank: int) -> Path:
        """Return the file of the samples that `rank` trained on, one JSON line a step."""
        return self.path / f"steps.rank{rank}.jsonl"

    def refuse_another_run(self, *, resume: bool) -> None:
        """Raise `RecipeError` when the folder already holds a run that is not to be resumed."""
        try:
            is_taken = self.recipe.exists()
        except OSError as error:
            raise RecipeError(f"--run-dir: {self.path} cannot be read: {error.strerror} (name another)") from None
        if is_taken and not resume:
            raise RecipeError(f"--run-dir: {self.path} already holds a run (add --resume, or name another)")

    def create(self) -> None:
        """Make the folder. Raise `RecipeError` when it cannot be."""
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RecipeError(f"--run-dir: {self.path} cannot be made: {error.strerror} (name another)") from None

    def write_json(self, name: str, values: Any) -> None:
        """Write `values` to file `name`, atomically."""
        write_atomic(self.path / name, json.dumps(values, indent=2) + "\n")

    def write_classes(self, table: ClassTable) -> None:
        """Write `classes.csv`, and `confusion.csv` where the table has a confusion matrix."""
        write_atomic(self.classes, classes_csv(table))
        if table.confusion:
            write_atomic(self.confusion, confusion_csv(table))

    def read_classes(self) -> tuple[ClassCount, ...]:
        """Return the classes of the last evaluation, none when there was none. Raise `PacelineError` for damage."""
        try:
            with self.classes.open(encoding="utf-8", newline="") as file:
                return read_classes_csv(file.read())
        except FileNotFoundError:
            return ()
        except (OSError, ValueError) as error:
            raise PacelineError(f"{self.classes}: cannot be read: {error} (remove it)") from None

    def write_result(self, result: RunResult) -> None:
        """Write `result.json`, which marks the run as finished."""
        write_atomic(self.path / "result.json", result.model_dump_json(indent=2) + "\n")

    def read_result(self) -> RunResult:
        """Return the result. Raise `PacelineError` when there is none or it cannot be read."""
        path = self.path / "result.json"
        try:
            return RunResult.model_validate_json(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise PacelineError(f"{path}: the run has not finished (continue it with --resume)") from None
        except OSError as error:
            raise PacelineError(f"{path}: cannot be read: {error.strerror} (name another run)") from None
        except ValueError as error:
            first = str(error).splitlines()[0]
            raise PacelineError(f"{path}: is not a result: {first} (run it again)") from None


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a JSON-lines file; a last line cut off by a kill is left out."""
    if path.exists():
        with path.open(encoding="utf-8") as file:
            for line in file:
                if line.endswith("\n"):
                    yield json.loads(line)
