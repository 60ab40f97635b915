"""Write the report of a run directory or of an experiment as one file."""

import json
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Final

from paceline.core.class_table import printable_class_name
from paceline.core.errors import RecipeError
from paceline.core.experiments.folder import ExperimentDir
from paceline.core.rundir import RunDir, write_atomic
from paceline.report.blocks import ReportPage
from paceline.report.data import run_to_data
from paceline.report.experiments.cut import ExperimentLimits, truncate_page
from paceline.report.experiments.page import build_experiment_page
from paceline.report.files import is_experiment_dir
from paceline.report.html import render_html
from paceline.report.markdown import render_markdown
from paceline.report.page import FULL_LIMITS, PageLimits, build_run_page
from paceline.report.run import read_run
from paceline.report.words import to_jsonable

# Keeps every report small enough to send by mail.
MAX_REPORT_BYTES: Final = 1_000_000
_RUN_LIMITS: Final = (
    FULL_LIMITS,
    PageLimits(classes=300, picture_bytes=150_000),
    PageLimits(classes=20, picture_bytes=0),
)
_EXPERIMENT_LIMITS: Final = (ExperimentLimits(300, 50_000), ExperimentLimits(100, 20_000), ExperimentLimits(20, 5_000))
REPORT_FORMATS: Final = ("html", "md", "json")


def write_report(rundir: RunDir) -> Path:
    """Write `report.html` into a run directory or an experiment's folder, and return its path.

    Raise `PacelineError` if the folder is neither, and `OSError` if the file cannot be written.
    """
    write_atomic(rundir.report, render_report(rundir, "html"))
    return rundir.report


def render_report(rundir: RunDir, kind: str) -> str:
    """Return the report of a run directory or an experiment as `html`, `md` or `json`.

    Raise `PacelineError` if the folder is neither, or if the experiment has not finished.
    """
    if kind not in REPORT_FORMATS:
        raise RecipeError(f"--format: {kind!r} is unknown (use html, md or json)")
    if is_experiment_dir(rundir.path):
        return _render_experiment(ExperimentDir(rundir.path), kind)
    run = read_run(rundir)
    match kind:
        case "md":
            return printable_class_name(render_markdown(build_run_page(run)))
        case "json":
            return json.dumps(run_to_data(run), indent=1, allow_nan=False) + "\n"
        case _:
            return _render_within_limit(run.path, (build_run_page(run, limits) for limits in _RUN_LIMITS))


def _render_experiment(folder: ExperimentDir, kind: str) -> str:
    result = folder.read()
    match kind:
        case "md":
            return printable_class_name(render_markdown(build_experiment_page(folder, result)))
        case "json":
            return json.dumps(to_jsonable(result.model_dump()), indent=1, allow_nan=False) + "\n"
        case _:
            page = build_experiment_page(folder, result)
            return _render_within_limit(
                folder.path, chain([page], (truncate_page(page, limit) for limit in _EXPERIMENT_LIMITS))
            )


def _render_within_limit(path: Path, pages: Iterable[ReportPage]) -> str:
    # Pages are ordered from full to most truncated.
    text = ""
    for page in pages:
        text = printable_class_name(render_html(page))
        if len(text.encode()) < MAX_REPORT_BYTES:
            break
    assert 0 < len(text.encode()) < MAX_REPORT_BYTES, f"{path}: a report of {len(text):,} characters"
    return text
