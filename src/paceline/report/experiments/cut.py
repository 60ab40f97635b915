"""A page of an experiment with less of what there is most of: rows, points and lines of files. The rest stays.

An experiment may have thousands of settings, and a page of all of them is nothing to send by mail; `table.csv`, beside
it, has every row of the main table, and `experiment.json` all that the page is made of.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from paceline.report.blocks import Bars, Block, Chart, Charts, Code, Facts, Line, Page, Paragraph, Section, Table

T = TypeVar("T")
_OF_CSV: Final = ("rungs", "speed", "batches", "time", "tried")
"""Sections whose table is `table.csv`, one of each kind of experiment."""


@dataclass(frozen=True)
class Limit:
    """How many rows a table, points a line and paragraphs a section have at most, and characters a file."""

    rows: int
    characters: int


def cut(page: Page, limit: Limit) -> Page:
    """Return a page within a limit; a section that has more says so."""
    return replace(page, sections=[_section(section, limit) for section in page.sections])


def _section(section: Section, limit: Limit) -> Section:
    blocks = [_block(block, limit) for block in _few_paragraphs(section.blocks, limit.rows)]
    if [block for block in blocks if not isinstance(block, Code)] == [
        block for block in section.blocks if not isinstance(block, Code)
    ]:
        return replace(section, blocks=blocks)  # a file says itself that there is more of it
    rest = "table.csv has every row" if section.key in _OF_CSV else "experiment.json has all"
    note = f"There is more than is shown: at most {limit.rows} rows of each table; {rest}."
    return replace(section, blocks=[*blocks, Paragraph(note, is_missing=True)])


def _few_paragraphs(blocks: Sequence[Block], most: int) -> list[Block]:
    left_out = {id(block) for block in [each for each in blocks if isinstance(each, Paragraph)][most:]}
    return [block for block in blocks if id(block) not in left_out]


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


def _spread(all_of: Sequence[T], most: int) -> list[T]:
    """Return `most` of more than so many, evenly spread, the first and the last among them."""
    return [all_of[place * (len(all_of) - 1) // (most - 1)] for place in range(most)]


def _beginning(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most].rpartition(chr(10))[0]}\n... (recipe.yaml has the rest)"
