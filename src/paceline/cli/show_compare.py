"""Print a comparison: tables of groups and runs, differing settings, findings and notes."""

from collections.abc import Sequence

from paceline.cli.show import print_rows
from paceline.cli.tables import print_table
from paceline.core.class_table import printable
from paceline.core.units import count
from paceline.report.blocks import Cell
from paceline.report.compare.page import ending, hours_heading, order, origin, reaching
from paceline.report.compare.read import Trained
from paceline.report.compare.result import CompareResult, GroupResult, RunOutcome
from paceline.report.compare.sentences import called_metric, level
from paceline.report.sections import cells
from paceline.report.words import clean

_REACHING = ("group", "reached", "time", "epochs", "speed-up")
_ENDING = ("group", "last", "best", "loss", "against the first")
_RUNS = ("directory", "group", "seed", "last", "best", "loss")
_FACTORS = ("group", "speed-up", "= by images/s", "x by images needed")


def show_comparison(result: CompareResult, runs: Sequence[Trained]) -> None:
    """Print a comparison of `runs`."""
    groups = [(rank, result.groups[rank]) for rank in result.ranked]
    if result.target is not None:
        rows = [[*map(_told, reaching(each, rank == 0))] for rank, each in groups]
        title = f"reaching {level(result.target)}, {origin(result)}"
        print_table(title, _REACHING, [row[:5] for row in rows], words=_REACHING)
        factors = [[row[0], *row[4:]] for row, (_, each) in zip(rows, groups, strict=True) if each.speedup is not None]
        if factors:
            why = "images/s until the target, and images needed"
            print_table(f"factors of the speed-up ({why})", _FACTORS, factors, words=_FACTORS)
    rows = [[*map(_told, ending(each, rank == 0))] for rank, each in groups]
    title = f"{called_metric(result.metric)} at the end ({count(len(runs), 'run')}){order(result)}"
    print_table(title, _ENDING, [row[:5] for row in rows], words=_ENDING)
    took = ("group", "images/s", hours_heading(runs))
    print_table("throughput and cost", took, [[row[0], *row[5:]] for row in rows], words=took)
    print_table("runs", _RUNS, [_run(each, run) for _, each in groups for run in each.runs], words=_RUNS)
    paths = dict.fromkeys(path for each in result.groups for path in each.settings)
    if paths:
        settings = [(path, *(each.settings.get(path, "-") for each in result.groups)) for path in paths]
        print_table("settings that differ", ("setting", *(each.name for each in result.groups)), settings,
                    words=[each.name for each in result.groups])  # fmt: skip
    print_rows([("found" if index == 0 else "", sentence) for index, sentence in enumerate(result.sentences)], "")
    for sentence in result.notes:
        print(f"note: {printable(sentence)}")


def _run(group: GroupResult, run: RunOutcome) -> list[str]:
    """Return the table row of a run."""
    seed = "" if run.seed is None else str(run.seed)
    last, best = (cells.of_accuracy(each).text for each in (run.accuracy, run.best))
    return [clean(run.path), group.name, seed, last, best, cells.loss(run.loss).text]


def _told(cell: Cell) -> str:
    return f"{cell.text} ({cell.note})" if cell.note else cell.text
