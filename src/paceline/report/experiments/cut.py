"""Truncate a page: rows, points and lines of files. Other blocks stay."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from paceline.report.blocks import Bars, Block, Chart, Charts, Code, Facts, Line, Page, Paragraph, Section, Table

T = TypeVar("T")
# Thousands of settings are too many for a page to mail. These sections' tables are in `table.csv`, one per kind of
# experiment, and `experiment.json` has everything.
_OF_CSV: Final = ("rungs", "speed", "batches", "time", "tried")


@dataclass(frozen=True)
class Limit:
    """Limits: rows of a table, points of a line and paragraphs of a section; and characters of a file."""

    rows: int
    characters: int


def cut(page: Page, limit: Limit) -> Page:
    """Return a truncated page; each truncated section says so."""
    return replace(page, sections=[_section(section, limit) for section in page.sections])


def _section(section: Section, limit: Limit) -> Section:
    blocks = [_block(block, limit) for block in _few_paragraphs(section.blocks, limit.rows)]
    if [block for block in blocks if not isinstance(block, Code)] == [
        block for block in section.blocks if not isinstance(block, Code)
    ]:
        return replace(section, blocks=blocks)  # a truncated file says so itself
    rest = "table.csv has every row" if section.key in _OF_CSV else "experiment.json has all"
    note = f"Truncated to {limit.rows} rows per table: {rest}."
    return replace(section, blocks=[*blocks, Paragraph(note, is_missing=True)])


def _few_paragraphs(blocks: Sequence[Block], most: int) -> list[Block]:
    dropped = {id(block) for block in [each for each in blocks if isinstance(each, Paragraph)][most:]}
    return [block for block in blocks if id(block) not in dropped]


def _block(block: Block, limit: Limit) -> Block:
    match block:
        case Table():
            return replace(block, rows=block.rows[: limit.rows])
        case Bars():
            return replace(block, rows=block.rows[: limit.rows])
        case Facts():
            return replace(block, rows=block.rows[: limit.rows])
        case Charts():
            return replace(block, charts=[_chart(chart, limit.rows) for chart in block.charts])
        case Code():
            return replace(block, text=_beginning(block.text, limit.characters))
        case _:
            return block


def _chart(chart: Chart, most: int) -> Chart:
    return replace(chart, lines=[_line(line, most) for line in chart.lines])


def _line(line: Line, most: int) -> Line:
    return replace(line, points=_spread(line.points, most)) if len(line.points) > most else line


def _spread(items: Sequence[T], most: int) -> list[T]:
    return [items[index * (len(items) - 1) // (most - 1)] for index in range(most)]


def _beginning(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most].rpartition(chr(10))[0]}\n... (recipe.yaml has the rest)"
