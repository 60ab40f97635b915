"""Leave an evaluation in a folder of its own, in the files that a run directory has of a run's last one."""

import contextlib
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from paceline.core.dataset import Source
from paceline.core.errors import PacelineError, RecipeError
from paceline.core.results import EvalReport
from paceline.core.rundir import RunDir
from paceline.train.worst import save_worst

TOLD: Final = "eval.json"


@contextlib.contextmanager
def claimed(out: Path) -> Iterator[RunDir]:
    """Make the folder `out`, which must not be there; where nothing comes of the evaluation it goes again.

    Raise `RecipeError` where it is there or cannot be made.
    """
    try:
        out.mkdir(parents=True)
    except FileExistsError:
        raise RecipeError(f"--out: {out} is there already (name another, or remove it)") from None
    except OSError as error:
        raise RecipeError(f"--out: {out} cannot be made: {error.strerror} (name another)") from None
    try:
        yield RunDir(out)
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)
        raise


def leave(folder: RunDir, told: Mapping[str, Any], report: EvalReport, source: Source) -> None:
    """Write `eval.json`, which is `told`, `classes.csv`, `confusion.csv`, and the worst images of `source`.

    Classes and images are those of the judged weights. Raise `PacelineError` where the disk refuses.
    """
    try:
        if report.classes is not None:
            folder.write_classes(report.classes)
        save_worst(folder.worst, report.worst, source)
    except OSError as error:
        raise PacelineError(f"--out: {folder.path} cannot be written: {error.strerror} (name another)") from None
    folder.write_json(TOLD, told)


def kept_nowhere(report: EvalReport, source: Source) -> None:
    """Write nothing."""
