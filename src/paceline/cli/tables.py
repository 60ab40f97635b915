"""Print rows and tables of text, and where a run is."""

import os
from collections.abc import Collection, Iterable, Sequence

from paceline.core.run_dir import RunDir
from paceline.data.files import printable
from paceline.report.document import Brief, KeyValueList, Table, TableCell, TableColumn
from paceline.report.render_terminal import print_blocks, print_brief


def print_table(
    title: str,
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    text_columns: Collection[str] = (),
    *,
    num_names: int = 1,
) -> None:
    """Print a table whose first column and `text_columns` are text, the others numbers."""
    columns = [
        TableColumn(heading, is_number=index > 0 and heading not in text_columns)
        for index, heading in enumerate(headings)
    ]
    print_blocks(Table(title, columns, [[*map(TableCell, row)] for row in rows], num_names=num_names))


def print_outcome(brief: Brief) -> None:
    """Print a brief; in the C locale in ASCII, although Python writes UTF-8 there (PEP 538)."""
    locale = os.environ.get("LC_ALL") or os.environ.get("LANG") or ""
    print_brief(brief, is_ascii=locale in ("C", "POSIX"))


def print_run_dir(rundir: RunDir) -> None:
    """Print the run directory, and the report if it exists."""
    print(f"run directory: {printable(rundir.path)}")
    if rundir.report.is_file():
        print(f"report: {printable(rundir.report)}")


def print_rows(rows: Sequence[tuple[str, ...]], title: str) -> None:
    """Print rows of equal length under a title; the first column is the row's name."""
    columns = [TableColumn("", is_number=False, is_wide=index > 1) for index in range(len(rows[0]))]
    if len(columns) > 2:
        print_blocks(Table(title, columns, [[*map(TableCell, row)] for row in rows]))
    else:
        print_blocks(KeyValueList([(name, TableCell(value)) for name, value in rows], title))
