"""Render a report in a terminal: its key figures, bottleneck, findings and summary; charts and images are omitted."""

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import Final

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from paceline.core.units import share
from paceline.report.document import (
    BarChart,
    Block,
    ChartRow,
    CodeBlock,
    Command,
    Fold,
    Gallery,
    HeatMap,
    KeyValueList,
    Paragraph,
    ReportPage,
    StackedBar,
    Table,
    TableCell,
    TableColumn,
)
from paceline.report.text import clean_lines

# Characters of a text column from which its words may be broken, of a column of sentences, and of a name if that
# saves a table.
_MAX_WORD_WIDTH: Final = 16
_MIN_SENTENCE_WIDTH: Final = 28
_MIN_NAME_WIDTH: Final = 8
_BAR_WIDTH: Final = 40


def print_page(page: ReportPage) -> None:
    """Print the title, status and summary of a page."""
    _build_console().print(clean_lines(f"{page.title}: {page.status}"), style="bold", soft_wrap=True)
    facts, summary = [figure.row for figure in page.figures], page.summary
    commands: list[Block] = []
    if page.verdict is not None:
        commands = [Paragraph("To try:"), Command(page.verdict.command)] if page.verdict.command else []
        texts = (f"{page.verdict.bottleneck}.", page.verdict.evidence, page.verdict.ceiling, page.verdict.advice)
        facts.append(("bottleneck", TableCell(" ".join(filter(None, texts)))))
    match page.summary:
        case [KeyValueList(title="") as more, *summary]:
            facts += more.rows
    print_blocks(
        *([Paragraph(" · ".join(page.subtitle))] if page.subtitle else []),
        *(Paragraph(f"could not be read: {problem}") for problem in page.problems),
        KeyValueList(facts),
        *commands,
        *([Paragraph(f"to look into: {', '.join(page.notices)}")] if page.notices else []),
        KeyValueList([finding.row for finding in page.health], "health"),
        *summary,
    )


def print_blocks(*blocks: Block) -> None:
    """Print blocks. Every character that is not printable is escaped: texts may come from a recipe or a file."""
    console = _build_console()
    for block in blocks:
        _print_block(console, block)


def _build_console() -> Console:
    return Console(highlight=False, markup=False, emoji=False)


def _print_block(console: Console, block: Block) -> None:
    match block:
        case Paragraph():
            # The terminal would break words; in a file a sentence stays one line.
            console.print(clean_lines(block.text), soft_wrap=not console.is_terminal)
        case Command():
            console.print(f"  {clean_lines(block.text)}", soft_wrap=True)
        case KeyValueList():
            _print_facts(console, block)
        case Table():
            _print_table(console, block)
        case StackedBar():
            columns = [TableColumn("part", is_number=False), TableColumn("time"), TableColumn("share")]
            rows = [[TableCell(each.name), TableCell(each.text), TableCell(share(each.share))] for each in block.parts]
            _print_table(console, Table(block.title, columns, rows))
        case BarChart():
            _print_bars(console, block)
        case Fold():
            for each in block.blocks:
                _print_block(console, each)
        case ChartRow() | HeatMap() | Gallery() | CodeBlock():
            pass


def _print_title(console: Console, title: str) -> None:
    if title:  # not as the table's own, which would be folded to the width of the table
        console.print(clean_lines(title), style="bold", soft_wrap=True)


def _print_facts(console: Console, facts: KeyValueList) -> None:
    if not facts.rows:
        return
    _print_title(console, facts.title)
    table = RichTable(box=box.ROUNDED, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, cell in facts.rows:
        table.add_row(clean_lines(name), _cell_text(cell, " "))
    console.print(table)


def _print_bars(console: Console, chart: BarChart) -> None:
    if not chart.rows:
        return
    _print_title(console, chart.title)
    lengths = [sum(segment.share for segment in row.parts) for row in chart.rows]
    names = [clean_lines(row.name) for row in chart.rows]
    width, longest = max(map(len, names)), max(lengths) or 1.0
    for name, row, length in zip(names, chart.rows, lengths, strict=True):
        bar = "█" * max(1, round(_BAR_WIDTH * length / longest))
        console.print(f"  {name:{width}} {bar} {clean_lines(row.text)}", soft_wrap=True)


def _print_table(console: Console, table: Table) -> None:
    """Print a table whose numbers are never cut.

    Columns that do not fit the terminal follow in further tables, which repeat those that identify a row. A column
    without values is left out.
    """
    rows = table.rows[: table.num_open or None]
    used = [
        index
        for index in range(len(table.columns))
        if index < table.num_names or not rows or any(row[index].text for row in rows)
    ]
    columns = [table.columns[index] for index in used]
    layouts = []
    # Break headings, put notes below values and break names only if that saves a table.
    for name_width, between, breaks_headings in product((_MAX_WORD_WIDTH, _MIN_NAME_WIDTH), (" ", "\n"), (False, True)):
        texts = [[_cell_text(row[index], between) for index in used] for row in rows]
        headings, widths = [], []
        for column, cells in zip(columns, zip(*texts, strict=True) if texts else [()] * len(columns), strict=True):
            width = _min_width(column, cells)
            headings.append(_break_heading(column, width) if breaks_headings else clean_lines(column.title))
            widths.append(max(width, _longest(headings[-1].split("\n"))) if column.is_number else width)
        widths[0] = widths[0] if columns[0].is_number else min(widths[0], name_width)
        layouts.append((list(_split_columns(widths, console.width, table.num_names)), [headings, *texts]))
    parts, texts = min(layouts, key=lambda layout: len(layout[0]))
    _print_title(console, table.title)
    for part in parts:
        console.print(_build_part(part, columns, texts, has_sum=table.has_sum))
    if len(rows) < len(table.rows):
        console.print(f"and {len(table.rows) - len(rows):,} {table.more}", soft_wrap=True)


def _break_heading(column: TableColumn, width: int) -> str:
    heading = clean_lines(column.title)
    return "\n".join(textwrap.wrap(heading, max(1, width))) if column.is_number else heading


def _build_part(
    part: Sequence[int], columns: Sequence[TableColumn], texts: Sequence[Sequence[str]], *, has_sum: bool
) -> RichTable:
    """Return the columns `part` of a table; the first row of `texts` has the headings."""
    headings, *rows = texts
    built = RichTable(box=box.ROUNDED, show_header=any(headings))
    for index in part:
        is_number = columns[index].is_number
        built.add_column(
            headings[index],
            justify="right" if is_number else "left",
            style="bold" if index == 0 else "",
            no_wrap=is_number,
            overflow="fold",
        )
    for number, row in enumerate(rows, start=1):
        built.add_row(*(row[index] for index in part), end_section=has_sum and number == len(rows) - 1)
    return built


def _cell_text(cell: TableCell, between: str) -> str:
    return clean_lines(f"{cell.text}{between}({cell.note})" if cell.note else cell.text)


def _min_width(column: TableColumn, texts: Iterable[str]) -> int:
    """Return the minimum width of a column: the longest line of numbers, the longest word of text up to a limit."""
    heading = _longest(clean_lines(column.title).split())
    if column.is_number:
        return max(heading, _longest(line for text in texts for line in text.split("\n")))
    if column.is_wide:
        return max(heading, min(_MIN_SENTENCE_WIDTH, _longest(texts)))
    return min(_MAX_WORD_WIDTH, max(heading, _longest(word for text in texts for word in text.split())))


def _longest(texts: Iterable[str]) -> int:
    return max(map(len, texts), default=0)


def _split_columns(widths: Sequence[int], room: int, num_names: int) -> Iterator[list[int]]:
    """Yield the column indices of each table; the first `num_names` are in all of them."""
    # Borders and padding: three characters per column, and one at the end.
    names_width = sum(widths[:num_names]) + 3 * num_names + 1
    columns, used = [*range(num_names)], names_width
    for index, width in enumerate(widths[num_names:], start=num_names):
        if used + width + 3 > room and len(columns) > num_names:
            yield columns
            columns, used = [*range(num_names)], names_width
        columns.append(index)
        used += width + 3
    yield columns
