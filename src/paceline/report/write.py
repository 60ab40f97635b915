"""Write the report of a run directory or of an experiment as one file."""

import json
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Final

from paceline.core.class_table import printable
from paceline.core.errors import RecipeError
from paceline.core.experiments.folder import ExperimentDir
from paceline.core.rundir import RunDir, write_atomic
from paceline.report.blocks import Page
from paceline.report.data import to_data
from paceline.report.experiments.cut import Limit, cut
from paceline.report.experiments.page import experiment_page
from paceline.report.files import is_experiment
from paceline.report.html import to_html
from paceline.report.markdown import to_markdown
from paceline.report.page import FULL, Limits, build_page
from paceline.report.run import read_run
from paceline.report.words import jsonable

# Keeps every report small enough to send by mail.
MAX_BYTES: Final = 1_000_000
_LIMITS: Final = (FULL, Limits(classes=300, picture_bytes=150_000), Limits(classes=20, picture_bytes=0))
_CUTS: Final = (Limit(300, 50_000), Limit(100, 20_000), Limit(20, 5_000))
FORMATS: Final = ("html", "md", "json")


def write_report(rundir: RunDir) -> Path:
    """Write `report.html` into a run directory or an experiment's folder, and return its path.

    Raise `PacelineError` if the folder is neither, and `OSError` if the file cannot be written.
    """
    write_atomic(rundir.report, report_text(rundir, "html"))
    return rundir.report


def report_text(rundir: RunDir, kind: str) -> str:
    """Return the report of a run directory or an experiment as `html`, `md` or `json`.

    Raise `PacelineError` if the folder is neither, or if the experiment has not finished.
    """
    if kind not in FORMATS:
        raise RecipeError(f"--format: {kind!r} is unknown (use html, md or json)")
    if is_experiment(rundir.path):
        return _experiment_text(ExperimentDir(rundir.path), kind)
    run = read_run(rundir)
    match kind:
        case "md":
            return printable(to_markdown(build_page(run)))
        case "json":
            return json.dumps(to_data(run), indent=1, allow_nan=False) + "\n"
        case _:
            return _html(run.path, (build_page(run, limits) for limits in _LIMITS))


def _experiment_text(folder: ExperimentDir, kind: str) -> str:
    result = folder.read()
    match kind:
        case "md":
            return printable(to_markdown(experiment_page(folder, result)))
        case "json":
            return json.dumps(jsonable(result.model_dump()), indent=1, allow_nan=False) + "\n"
        case _:
            page = experiment_page(folder, result)
            return _html(folder.path, chain([page], (cut(page, limit) for limit in _CUTS)))


def _html(path: Path, pages: Iterable[Page]) -> str:
    # Pages are ordered from full to most truncated.
    text = ""
    for page in pages:
        text = printable(to_html(page))
        if len(text.encode()) < MAX_BYTES:
            break
    assert 0 < len(text.encode()) < MAX_BYTES, f"{path}: a report of {len(text):,} characters"
    return text
