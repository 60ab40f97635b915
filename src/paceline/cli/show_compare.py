"""Show a comparison to a person: what was found, tables of the groups, what differs, and what to know of it."""

from collections.abc import Sequence

from paceline.cli.show import print_rows
from paceline.cli.tables import print_table
from paceline.core.class_table import printable
from paceline.core.units import count
from paceline.report.blocks import Cell
from paceline.report.compare import CompareResult, Trained
from paceline.report.compare.page import ending, hours_heading, reaching
from paceline.report.compare.sentences import level

_REACHING = ("group", "reached", "time", "epochs", "speed-up")
_FACTORS = ("group", "speed-up", "= by hardware", "x by statistics")
_ENDING = ("group", "accuracy", "against the first", "images/s")


def show_comparison(result: CompareResult, runs: Sequence[Trained]) -> None:
    """Print a comparison of `runs`."""
    groups = list(enumerate(result.groups))
    if result.target is not None:
        rows = [[*map(_told, reaching(each, index == 0))] for index, each in groups]
        print_table(f"reaching {level(result.target)}", _REACHING, [row[:5] for row in rows], words=_REACHING)
        factors = [[row[0], *row[4:]] for row, (_, each) in zip(rows, groups, strict=True) if each.speedup is not None]
        if factors:
            why = "images/s on the way there, and images needed"
            print_table(f"what the speed-up is made of ({why})", _FACTORS, factors, words=_FACTORS)
    headings = (*_ENDING, hours_heading(runs))
    rows = [[*map(_told, ending(each, index == 0))] for index, each in groups]
    print_table(f"at the end ({count(len(runs), 'run')})", headings, rows, words=headings)
    paths = dict.fromkeys(path for each in result.groups for path in each.settings)
    if paths:
        settings = [(path, *(each.settings.get(path, "-") for each in result.groups)) for path in paths]
        print_table("settings that differ", ("setting", *(each.name for each in result.groups)), settings,
                    words=[each.name for each in result.groups])  # fmt: skip
    print_rows([("found" if index == 0 else "", said) for index, said in enumerate(result.sentences)], "")
    for said in result.notes:
        print(f"note: {printable(said)}")


def _told(cell: Cell) -> str:
    return f"{cell.text} ({cell.note})" if cell.note else cell.text
