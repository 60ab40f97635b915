"""Write the outputs of an evaluation to a folder, in the file formats of a run directory."""

import contextlib
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from paceline.core.dataset import Source
from paceline.core.errors import PacelineError, RecipeError
from paceline.core.results import EvalReport
from paceline.core.rundir import RunDir
from paceline.train.worst import save_worst_images

EVAL_JSON: Final = "eval.json"


@contextlib.contextmanager
def output_dir(path: Path) -> Iterator[RunDir]:
    """Create the folder `path`, which must not exist; remove it if the evaluation fails.

    Raise `RecipeError` if it exists or cannot be created.
    """
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        raise RecipeError(f"--out: {path} exists already (name another, or remove it)") from None
    except OSError as error:
        raise RecipeError(f"--out: {path} cannot be created: {error.strerror} (name another)") from None
    try:
        yield RunDir(path)
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise


def write_eval_outputs(folder: RunDir, values: Mapping[str, Any], report: EvalReport, source: Source) -> None:
    """Write `eval.json` with the values `values`, `classes.csv`, `confusion.csv` and the worst images of `source`.

    Raise `PacelineError` if the folder cannot be written.
    """
    try:
        if report.classes is not None:
            folder.write_classes(report.classes)
        save_worst_images(folder.worst, report.worst, source)
    except OSError as error:
        raise PacelineError(f"--out: {folder.path} cannot be written: {error.strerror} (name another)") from None
    folder.write_json(EVAL_JSON, values)


def discard(report: EvalReport, source: Source) -> None:
    """Discard the report."""
