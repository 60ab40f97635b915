"""Write the report of a run directory, of an experiment or of a watched command as one file."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Final, TypeVar

from paceline.core.errors import RecipeError
from paceline.core.experiments.experiment_dir import ExperimentDir
from paceline.core.results import printable_class_name
from paceline.core.run_dir import RunDir, write_atomic
from paceline.core.watch_result import is_watch_dir, read_watch_result
from paceline.report.document import (
    BarChart,
    Block,
    Chart,
    ChartLine,
    ChartRow,
    CodeBlock,
    Fold,
    Gallery,
    KeyValueList,
    PageSection,
    Paragraph,
    ReportPage,
    Table,
)
from paceline.report.experiment_tables import build_experiment_page
from paceline.report.mistake_sections import limit_thumbnails
from paceline.report.read_run import is_experiment_dir, read_run
from paceline.report.render import LiveVersion, render_html, render_markdown, run_to_data
from paceline.report.run_page import build_run_page
from paceline.report.text import to_jsonable
from paceline.report.watch_page import build_watch_page

# Keeps every report small enough to send by mail.
MAX_REPORT_BYTES: Final = 1_000_000
REPORT_FORMATS: Final = ("html", "md", "json")
T = TypeVar("T")


@dataclass(frozen=True)
class PageLimit:
    """Limits of a page: rows of a table, points of a line, paragraphs of a section; characters of a file; bytes of
    thumbnails.
    """

    rows: int
    characters: int
    picture_bytes: int


_LIMITS: Final = (PageLimit(300, 50_000, 150_000), PageLimit(100, 20_000, 50_000), PageLimit(20, 5_000, 0))


def write_report(rundir: RunDir) -> Path:
    """Write `report.html` into a run directory or an experiment's folder, and return its path.

    Raise `PacelineError` if the folder is neither, and `OSError` if the file cannot be written.
    """
    # Atomic: a reader never sees half a report.
    write_atomic(rundir.report, render_report(rundir, "html"))
    return rundir.report


def render_report(rundir: RunDir, kind: str) -> str:
    """Return the report of a run directory, an experiment or a watched command as `html`, `md` or `json`.

    Raise `PacelineError` if the folder is none of them, or if the experiment has not finished.
    """
    if kind not in REPORT_FORMATS:
        raise RecipeError(f"--format: {kind!r} is unknown (use html, md or json)")
    data: Any
    if is_watch_dir(rundir.path):
        watched = read_watch_result(rundir.path)
        data, page = to_jsonable(watched.model_dump()), build_watch_page(watched, rundir.path)
    elif is_experiment_dir(rundir.path):
        folder = ExperimentDir(rundir.path)
        result = folder.read()
        data, page = to_jsonable(result.model_dump()), build_experiment_page(folder, result)
    else:
        run = read_run(rundir)
        data, page = run_to_data(run), build_run_page(run)
    match kind:
        case "md":
            return printable_class_name(render_markdown(page))
        case "json":
            return json.dumps(data, indent=1, allow_nan=False) + "\n"
        case _:
            return render_page(rundir.path, page)


def render_page(path: Path, page: ReportPage, live: LiveVersion | None = None) -> str:
    """Return the page of the folder `path` as HTML below 1 MB; `live` as in `render_html`."""
    text = ""
    for each in chain([page], (truncate_page(page, limit) for limit in _LIMITS)):
        text = printable_class_name(render_html(each, live))
        if len(text.encode()) < MAX_REPORT_BYTES:
            break
    assert 0 < len(text.encode()) < MAX_REPORT_BYTES, f"{path}: a report of {len(text):,} characters"
    return text


def truncate_page(page: ReportPage, limit: PageLimit) -> ReportPage:
    """Return a truncated page; each truncated section says so."""
    return replace(page, sections=[_truncate_section(section, limit) for section in page.sections])


def _truncate_section(section: PageSection, limit: PageLimit) -> PageSection:
    blocks = [_truncate_block(block, limit) for block in _truncate_paragraphs(section.blocks, limit.rows)]
    if [block for block in blocks if not isinstance(block, CodeBlock)] == [
        block for block in section.blocks if not isinstance(block, CodeBlock)
    ]:
        return replace(section, blocks=blocks)  # a truncated file says so itself
    note = f"Truncated to {limit.rows} rows per table: paceline report --format json has all."
    return replace(section, blocks=[*blocks, Paragraph(note, is_missing=True)])


def _truncate_paragraphs(blocks: Sequence[Block], most: int) -> list[Block]:
    dropped = {id(block) for block in [each for each in blocks if isinstance(each, Paragraph)][most:]}
    return [block for block in blocks if id(block) not in dropped]


def _truncate_block(block: Block, limit: PageLimit) -> Block:
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
        case Gallery():
            return replace(block, pictures=limit_thumbnails(block.pictures, limit.picture_bytes))
        case Fold():
            return replace(block, blocks=[_truncate_block(each, limit) for each in block.blocks])
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
