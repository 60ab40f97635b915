"""Print tables of numbers: an unfolded title, and columns split over several tables if the terminal is narrow."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Final

from rich import box
from rich.console import Console
from rich.table import Table

from paceline.data.sources.places import printable_lines

_MAX_WORD_WIDTH: Final = 16
"""Length in characters from which a word may be broken."""
_MIN_NAME_WIDTH: Final = 8
"""Minimum width of name columns, in characters."""


def print_table(
    title: str,
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    text_columns: Collection[str] = (),
    *,
    num_names: int = 1,
) -> None:
    """Print a table. The first column and those headed by one of `text_columns` are text, the others numbers.

    Numbers are never cut: columns that do not fit the terminal follow in further tables, which repeat the first `num_names`
    columns.
    """
    table = [[*map(printable_lines, row)] for row in rows]  # cells may come from a recipe or a file
    is_text = [index == 0 or heading in text_columns for index, heading in enumerate(headings)]
    console = Console(highlight=False, markup=False)
    console.print(printable_lines(title), style="bold", soft_wrap=True)  # a table would fold its title to its own width
    widths = [
        _min_width([heading, *(row[index] for row in table)], is_text=is_text[index])
        for index, heading in enumerate(headings)
    ]
    parts, folded = (
        list(_split_columns([min(widths[0], most), *widths[1:]], console.width, num_names))
        for most in (_MAX_WORD_WIDTH, _MIN_NAME_WIDTH)
    )
    for columns in folded if len(folded) < len(parts) else parts:  # break names if that saves a table
        cells = [[row[index] for index in columns] for row in table]
        console.print(
            _build_column_table([headings[index] for index in columns], cells, [is_text[index] for index in columns])
        )


def _build_column_table(headings: Sequence[str], rows: Sequence[Sequence[str]], is_text: Sequence[bool]) -> Table:
    table = Table(box=box.ROUNDED)
    for index, (heading, is_text_column) in enumerate(zip(headings, is_text, strict=True)):
        style = "bold" if index == 0 else ""
        table.add_column(
            heading,
            justify="left" if is_text_column else "right",
            style=style,
            no_wrap=not is_text_column,
            overflow="fold",
        )
    for row in rows:
        table.add_row(*row)
    return table


def _min_width(cells: Sequence[str], *, is_text: bool) -> int:
    """Return the minimum width of a column: its longest line for numbers, its longest word up to a limit for text."""
    if not is_text:
        return max(len(line) for cell in cells for line in cell.split("\n"))
    return min(_MAX_WORD_WIDTH, max((len(word) for cell in cells for word in cell.split()), default=0))


def _split_columns(widths: Sequence[int], room: int, names: int) -> Iterator[list[int]]:
    """Yield the column indices of each table, the first `names` in all of them; a column has three more characters."""
    names_width = sum(widths[:names]) + 3 * names + 1
    columns, used = [*range(names)], names_width
    for index, width in enumerate(widths[names:], start=names):
        if used + width + 3 > room and len(columns) > names:
            yield columns
            columns, used = [*range(names)], names_width
        columns.append(index)
        used += width + 3
    yield columns
