"""Print a comparison: tables of groups and runs, differing settings, findings and notes."""

from collections.abc import Sequence

from paceline.cli.show import print_rows
from paceline.cli.tables import print_table
from paceline.core.class_table import printable_class_name
from paceline.core.units import count
from paceline.report.blocks import TableCell
from paceline.report.compare.page import (
    describe_order,
    describe_target_origin,
    ending_cells,
    hours_heading,
    reaching_cells,
)
from paceline.report.compare.read import ComparedRun
from paceline.report.compare.result import CompareResult, GroupResult, RunOutcome
from paceline.report.compare.sentences import format_metric, format_target
from paceline.report.sections import cells
from paceline.report.words import clean_text

_TARGET_COLUMNS = ("group", "reached", "time", "epochs", "speed-up")
_FINAL_COLUMNS = ("group", "last", "best", "loss", "against the first")
_RUN_COLUMNS = ("directory", "group", "seed", "last", "best", "loss")
_FACTOR_COLUMNS = ("group", "speed-up", "= by images/s", "x by images needed")


def show_comparison(result: CompareResult, runs: Sequence[ComparedRun]) -> None:
    """Print a comparison of `runs`."""
    groups = [(rank, result.groups[rank]) for rank in result.ranked_indices]
    if result.target is not None:
        rows = [[*map(_cell_text, reaching_cells(each, rank == 0))] for rank, each in groups]
        title = f"reaching {format_target(result.target)}, {describe_target_origin(result)}"
        print_table(title, _TARGET_COLUMNS, [row[:5] for row in rows], text_columns=_TARGET_COLUMNS)
        factors = [[row[0], *row[4:]] for row, (_, each) in zip(rows, groups, strict=True) if each.speedup is not None]
        if factors:
            why = "images/s until the target, and images needed"
            print_table(f"factors of the speed-up ({why})", _FACTOR_COLUMNS, factors, text_columns=_FACTOR_COLUMNS)
    rows = [[*map(_cell_text, ending_cells(each, rank == 0))] for rank, each in groups]
    title = f"{format_metric(result.metric)} at the end ({count(len(runs), 'run')}){describe_order(result)}"
    print_table(title, _FINAL_COLUMNS, [row[:5] for row in rows], text_columns=_FINAL_COLUMNS)
    took = ("group", "images/s", hours_heading(runs))
    print_table("throughput and cost", took, [[row[0], *row[5:]] for row in rows], text_columns=took)
    print_table(
        "runs",
        _RUN_COLUMNS,
        [_run_row(each, run) for _, each in groups for run in each.runs],
        text_columns=_RUN_COLUMNS,
    )
    paths = dict.fromkeys(path for each in result.groups for path in each.settings)
    if paths:
        settings = [(path, *(each.settings.get(path, "-") for each in result.groups)) for path in paths]
        print_table("settings that differ", ("setting", *(each.name for each in result.groups)), settings,
                    text_columns=[each.name for each in result.groups])  # fmt: skip
    print_rows([("found" if index == 0 else "", sentence) for index, sentence in enumerate(result.sentences)], "")
    for sentence in result.notes:
        print(f"note: {printable_class_name(sentence)}")


def _run_row(group: GroupResult, run: RunOutcome) -> list[str]:
    """Return the table row of a run."""
    seed = "" if run.seed is None else str(run.seed)
    last, best = (cells.accuracy_cell(each).text for each in (run.accuracy, run.best))
    return [clean_text(run.path), group.name, seed, last, best, cells.loss_cell(run.loss).text]


def _cell_text(cell: TableCell) -> str:
    return f"{cell.text} ({cell.note})" if cell.note else cell.text
