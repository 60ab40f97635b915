"""Truncate a page: rows, points and lines of files. Other blocks stay."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from paceline.report.blocks import (
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

T = TypeVar("T")
# Thousands of settings are too many for a page to mail. These sections' tables are in `table.csv`, one per kind of
# experiment, and `experiment.json` has everything.
_CSV_SECTIONS: Final = ("rungs", "speed", "batches", "time", "tried")


@dataclass(frozen=True)
class ExperimentLimits:
    """Limits: rows of a table, points of a line and paragraphs of a section; and characters of a file."""

    rows: int
    characters: int


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
