"""Render the results of experiments: their pages, and tables as CSV with every value and as Markdown to paste."""

import csv
import io
import shlex
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from paceline.core.csv_cells import to_cell
from paceline.core.errors import PacelineError
from paceline.core.experiments.experiment_dir import Experiment, ExperimentDir
from paceline.core.experiments.results import (
    CrossValidationResult,
    LadderResult,
    LearnResult,
    LrFindResult,
    PredictionResult,
    ScaleResult,
    SweepResult,
    TuneResult,
)
from paceline.core.results import printable_class_name
from paceline.core.run_dir import write_atomic
from paceline.report.cross_validation_page import build_cross_validation_page, cross_validation_rows
from paceline.report.document import ReportPage
from paceline.report.experiment_common import Column, ExperimentReport, ResultRows
from paceline.report.ladder_page import build_ladder_page, ladder_rows
from paceline.report.learn_page import build_learn_page, learn_rows
from paceline.report.lr_find_page import build_lr_find_page, lr_find_rows
from paceline.report.prediction_page import build_prediction_page, prediction_rows
from paceline.report.read_run import TolerantReader
from paceline.report.render import markdown_table_lines
from paceline.report.scaling_page import batch_rows, build_batch_page, build_scaling_page, scaling_rows
from paceline.report.tuning_page import build_sweep_page, build_tuning_page, sweep_rows, tuning_rows

_MAX_RECIPE_BYTES: Final = 256 << 10


def build_experiment_page(folder: ExperimentDir, result: Experiment) -> ReportPage:
    """Return the page of an experiment's result."""
    reader = TolerantReader()
    report = ExperimentReport(folder.path, reader.read_text(folder.recipe, _MAX_RECIPE_BYTES), reader.problems)
    build_page, _ = _choose_builders(result)
    return build_page(report)


def _choose_builders(result: Experiment) -> tuple[Callable[[ExperimentReport], ReportPage], Callable[[], ResultRows]]:
    """Return the functions that build the page and the rows of a result."""
    match result:
        case LadderResult():
            return partial(build_ladder_page, result=result), partial(ladder_rows, result)
        case ScaleResult(mode="batch"):
            return partial(build_batch_page, result=result), partial(batch_rows, result)
        case ScaleResult():
            return partial(build_scaling_page, result=result), partial(scaling_rows, result)
        case PredictionResult():
            return partial(build_prediction_page, result=result), partial(prediction_rows, result)
        case TuneResult():
            return partial(build_tuning_page, result=result), partial(tuning_rows, result)
        case SweepResult():
            return partial(build_sweep_page, result=result), partial(sweep_rows, result)
        case LrFindResult():
            return partial(build_lr_find_page, result=result), partial(lr_find_rows, result)
        case LearnResult():
            return partial(build_learn_page, result=result), partial(learn_rows, result)
        case CrossValidationResult():
            return partial(build_cross_validation_page, result=result), partial(cross_validation_rows, result)


def write_tables(folder: ExperimentDir, result: Experiment) -> None:
    """Write `table.csv` and `table.md`. Raise `PacelineError` if that fails."""
    for path, text in ((folder.table, to_csv(result)), (folder.markdown, to_markdown_table(result))):
        try:
            write_atomic(path, printable_class_name(text))
        except OSError as error:
            raise PacelineError(f"{path}: cannot be written: {error.strerror} (free some room)") from None


def to_csv(result: Experiment) -> str:
    """Return a result as CSV with a header and LF line ends.

    Values are as measured, in the unit of their column name; fields not measured are empty.
    """
    _, build_rows = _choose_builders(result)
    rows = build_rows()
    columns = [column for column in rows.columns if column.in_csv]
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([name for column in columns for name in _csv_names(column)])
    writer.writerows(
        [value for column in columns for value in _csv_values(column, record.get(column.key))]
        for record in rows.records
    )
    return file.getvalue()


def to_markdown_table(result: Experiment) -> str:
    """Return a result as a GitHub Markdown table: the main columns, rounded."""
    _, build_rows = _choose_builders(result)
    return "\n".join([*markdown_table_lines(build_rows().main_table()), ""])


def _csv_names(column: Column) -> list[str]:
    if not column.has_interval:
        return [column.key]
    return [column.key, f"{column.key}_low", f"{column.key}_high", f"{column.key}_n"]


def _csv_values(column: Column, value: Any) -> list[str | float | None]:
    if column.has_interval:
        return [None] * 4 if value is None else [value.value, value.low, value.high, value.n]
    if isinstance(value, tuple):
        value = shlex.join(value)
    return [to_cell(value) if isinstance(value, str) else value]
