"""Tables of numbers for a person: a title that is not folded, and columns that are."""

from collections.abc import Collection, Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from paceline.data.sources.places import printable_lines


def print_table(
    title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], words: Collection[str] = ()
) -> None:
    """Print a table whose first column names; those headed by one of `words` tell, the others are numbers."""
    table = Table(box=box.ROUNDED)
    for index, heading in enumerate(headings):
        is_text = index == 0 or heading in words
        style = "bold" if index == 0 else ""
        table.add_column(heading, justify="left" if is_text else "right", style=style, no_wrap=not is_text)
    for row in rows:
        table.add_row(*map(printable_lines, row))  # a recipe or a file may have brought a cell
    console = Console(highlight=False, markup=False)
    console.print(printable_lines(title), style="bold", soft_wrap=True)  # a table would fold its title at its own width
    console.print(table)
