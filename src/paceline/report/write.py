"""Write the report of a run directory or of an experiment as one file."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Final, TypeVar

from paceline.core.errors import RecipeError
from paceline.core.experiments.experiment_dir import Experiment, ExperimentDir
from paceline.core.experiments.results import LadderResult, PredictionResult, ScaleResult, SweepResult, TuneResult
from paceline.core.results import printable_class_name
from paceline.core.run_dir import RunDir, write_atomic
from paceline.report.document import (
    BarChart,
    Block,
    Chart,
    ChartLine,
    ChartRow,
    CodeBlock,
    KeyValueList,
    PageSection,
    Paragraph,
    ReportPage,
    Table,
)
from paceline.report.experiment_common import ExperimentReport
from paceline.report.ladder_page import build_ladder_page
from paceline.report.prediction_page import build_prediction_page
from paceline.report.read_run import TolerantReader, is_experiment_dir, read_run
from paceline.report.render import render_html, render_markdown, run_to_data
from paceline.report.run_page import FULL_LIMITS, PageLimits, build_run_page
from paceline.report.scaling_page import build_batch_page, build_scaling_page
from paceline.report.text import to_jsonable
from paceline.report.tuning_page import build_sweep_page, build_tuning_page

# Keeps every report small enough to send by mail.
MAX_REPORT_BYTES: Final = 1_000_000
_MAX_RECIPE_BYTES = 256 << 10
REPORT_FORMATS: Final = ("html", "md", "json")
_RUN_LIMITS: Final = (
    FULL_LIMITS,
    PageLimits(classes=300, picture_bytes=150_000),
    PageLimits(classes=20, picture_bytes=0),
)
# Thousands of settings are too many for a page to mail. These sections' tables are in `table.csv`, one per kind of
# experiment, and `experiment.json` has everything.
_CSV_SECTIONS: Final = ("rungs", "speed", "batches", "time", "tried")
T = TypeVar("T")


@dataclass(frozen=True)
class ExperimentLimits:
    """Rows of a table, points of a line and paragraphs of a section; and characters of a file."""

    rows: int
    characters: int


_EXPERIMENT_LIMITS: Final = (ExperimentLimits(300, 50_000), ExperimentLimits(100, 20_000), ExperimentLimits(20, 5_000))


def write_report(rundir: RunDir) -> Path:
    """Write `report.html` into a run directory or an experiment's folder, and return its path.

    Raise `PacelineError` if the folder is neither, and `OSError` if the file cannot be written.
    """
    # Atomic: a reader never sees half a report.
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


def build_experiment_page(folder: ExperimentDir, result: Experiment) -> ReportPage:
    """Return the page of an experiment's result."""
    reader = TolerantReader()
    recipe = reader.read_text(folder.recipe, _MAX_RECIPE_BYTES)
    report = ExperimentReport(folder.path, recipe, reader.problems)
    match result:
        case LadderResult():
            return build_ladder_page(report, result)
        case ScaleResult(mode="batch"):
            return build_batch_page(report, result)
        case ScaleResult():
            return build_scaling_page(report, result)
        case PredictionResult():
            return build_prediction_page(report, result)
        case TuneResult():
            return build_tuning_page(report, result)
        case SweepResult():
            return build_sweep_page(report, result)


def truncate_page(page: ReportPage, limit: ExperimentLimits) -> ReportPage:
    """Return a truncated page; each truncated section says so."""
    return replace(page, sections=[_truncate_section(section, limit) for section in page.sections])


def _truncate_section(section: PageSection, limit: ExperimentLimits) -> PageSection:
    blocks = [_truncate_block(block, limit) for block in _truncate_paragraphs(section.blocks, limit.rows)]
    if [block for block in blocks if not isinstance(block, CodeBlock)] == [
        block for block in section.blocks if not isinstance(block, CodeBlock)
    ]:
        return replace(section, blocks=blocks)  # a truncated file says so itself
    rest = "table.csv has every row" if section.key in _CSV_SECTIONS else "experiment.json has all"
    note = f"Truncated to {limit.rows} rows per table: {rest}."
    return replace(section, blocks=[*blocks, Paragraph(note, is_missing=True)])


def _truncate_paragraphs(blocks: Sequence[Block], most: int) -> list[Block]:
    dropped = {id(block) for block in [each for each in blocks if isinstance(each, Paragraph)][most:]}
    return [block for block in blocks if id(block) not in dropped]


def _truncate_block(block: Block, limit: ExperimentLimits) -> Block:
    match block:
        case Table():
            return replace(block, rows=block.rows[: limit.rows])
        case BarChart():
            return replace(block, rows=block.rows[: limit.rows])
        case KeyValueList():
            return replace(block, rows=block.rows[: limit.rows])
        case ChartRow():
            return replace(block, charts=[_truncate_chart(chart, limit.rows) for chart in block.charts])
        case CodeBlock():
            return replace(block, text=_truncate_text(block.text, limit.characters))
        case _:
            return block


def _truncate_chart(chart: Chart, most: int) -> Chart:
    return replace(chart, lines=[_truncate_line(line, most) for line in chart.lines])


def _truncate_line(line: ChartLine, most: int) -> ChartLine:
    return replace(line, points=_pick_evenly(line.points, most)) if len(line.points) > most else line


def _pick_evenly(items: Sequence[T], most: int) -> list[T]:
    return [items[index * (len(items) - 1) // (most - 1)] for index in range(most)]


def _truncate_text(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most].rpartition(chr(10))[0]}\n... (recipe.yaml has the rest)"
