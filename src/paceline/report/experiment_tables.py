"""Write experiment results as tables: CSV with every value, Markdown to paste."""

import csv
import io
import shlex
from collections.abc import Iterable, Sequence
from itertools import chain

from paceline.core.csv_cells import to_cell
from paceline.core.errors import PacelineError
from paceline.core.experiments.experiment_dir import Experiment, ExperimentDir
from paceline.core.experiments.results import (
    BatchPoint,
    LadderResult,
    ParityResult,
    PredictionResult,
    RungResult,
    ScalePoint,
    ScaleResult,
    SweepPoint,
    SweepResult,
    TriedResult,
    TuneResult,
)
from paceline.core.results import printable_class_name
from paceline.core.run_dir import write_atomic
from paceline.core.statistics import Interval
from paceline.report.ladder_page import ladder_table
from paceline.report.prediction_page import prediction_table
from paceline.report.render import markdown_table_lines
from paceline.report.scaling_page import batch_table, scaling_table
from paceline.report.tuning_page import sweep_table, tuning_table

CsvValue = str | float | None
CsvRow = dict[str, CsvValue]


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
    columns, rows = build_columns_and_rows(result)
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([to_cell(cell) if isinstance(cell, str) else cell for cell in row] for row in rows)
    return file.getvalue()


def to_markdown_table(result: Experiment) -> str:
    """Return a result as a GitHub Markdown table: the main columns, rounded."""
    match result:
        case LadderResult():
            table = ladder_table(result)
        case ScaleResult(mode="batch"):
            table = batch_table(result)
        case ScaleResult():
            table = scaling_table(result)
        case PredictionResult():
            table = prediction_table(result)
        case TuneResult():
            table = tuning_table(result)
        case SweepResult():
            table = sweep_table(result)
    return "\n".join([*markdown_table_lines(table), ""])


def build_columns_and_rows(result: Experiment) -> tuple[list[str], list[list[CsvValue]]]:
    """Return the columns and rows of a result."""
    match result:
        case LadderResult():
            records = [_rung_row(rung) for rung in result.rungs]
        case ScaleResult(mode="batch"):
            records = [_batch_row(point) for point in result.batches]
        case ScaleResult():
            records = [_scaling_row(point) for point in result.points]
        case PredictionResult():
            records = _prediction_rows(result)
        case TuneResult():
            records = [_tried_row(tried) for tried in result.tried]
        case SweepResult():
            records = [_sweep_row(result.key, point) for point in result.points]
    columns = _all_columns(records)
    return columns, [[record.get(column) for column in columns] for record in records]


def _all_columns(records: Iterable[CsvRow]) -> list[str]:
    return list(dict.fromkeys(chain.from_iterable(records)))


def _rung_row(rung: RungResult) -> CsvRow:
    return {
        "rung": rung.name,
        "status": rung.status,
        "why": rung.why,
        "patch": _join_arguments(rung.patch),
        "below": rung.below,
        "ranks": rung.ranks,
        **_interval_fields("images_per_s", rung.images_per_s),
        **_spread_fields(rung.spread),
        **_interval_fields("over_below", rung.over_below),
        **_interval_fields("over_first", rung.over_first),
        "step_s": rung.step_s,
        "epoch_s": rung.epoch_s,
        "steps_s": rung.steps_s,
        "startup_s": rung.startup_s,
        "compile_s": rung.compile_s,
        "prepare_s": rung.prepare_s,
        "host_bytes": rung.host_bytes,
        "device_bytes": rung.device_bytes,
        **_parity_fields(rung.parity),
        "bottleneck": rung.verdict.get("bottleneck"),
        "expects": _join_arguments(rung.expects),
        **{f"stage_{name}_s": value for name, value in rung.stages.items()},
    }


def _scaling_row(point: ScalePoint) -> CsvRow:
    return {
        "ranks": point.ranks,
        "nodes": point.nodes,
        "batch_size": point.batch_size,
        "rank_batch": point.rank_batch,
        **_interval_fields("images_per_s", point.images_per_s),
        **_spread_fields(point.spread),
        "step_s": point.step_s,
        "epoch_s": point.epoch_s,
        "steps_s": point.steps_s,
        **_interval_fields("efficiency", point.efficiency),
        **_interval_fields("speedup", point.speedup),
        "exposed_s": point.exposed_s,
        "exposed_share": point.exposed_share,
        "straggler_share": point.straggler_share,
        "startup_s": point.startup_s,
        "wall_s": point.wall_s,
        **_interval_fields("top1", point.top1),
        **_interval_fields("top1_gap", point.top1_gap),
        "bottleneck": point.bottleneck,
        "error": point.error,
    }


def _batch_row(point: BatchPoint) -> CsvRow:
    return {
        "batch_size": point.batch_size,
        "warmup": point.warmup,
        "lr_rule": point.lr_rule,
        "lr": point.lr,
        "seeds": point.seeds,
        "reached": point.reached,
        **_interval_fields("top1", point.top1),
        **_interval_fields("images_per_s", point.images_per_s),
        "epoch_s": point.epoch_s,
        **_interval_fields("to_target_s", point.to_target_s),
        **_interval_fields("to_target_epochs", point.to_target_epochs),
        "error": point.error,
    }


def _prediction_rows(result: PredictionResult) -> list[CsvRow]:
    measured: list[CsvRow] = [
        {
            "basis": "measured",
            "ranks": point.ranks,
            "nodes": point.nodes,
            "rank_batch": point.rank_batch,
            "images": point.images,
            "time_s": point.time_s,
            "fitted_s": point.fitted_s,
            "speedup": point.speedup,
            "efficiency": point.efficiency,
            "fitted_efficiency": point.fitted_efficiency,
        }
        for point in result.points
    ]
    predicted: list[CsvRow] = [
        {
            "basis": "predicted",
            **each.model_dump(mode="python", exclude={"parts"}),
            **{f"part_{name}_s": value for name, value in each.parts.items()},
        }
        for each in result.predictions
    ]
    return [*measured, *predicted]


def _tried_row(tried: TriedResult) -> CsvRow:
    return {
        "settings": tried.name,
        "status": tried.status,
        "why": tried.why,
        "patch": _join_arguments(tried.patch),
        "over": tried.over,
        "round": tried.round,
        "steps": tried.steps,
        "trials": tried.trials,
        "images_per_s": tried.images_per_s,
        **_interval_fields("ratio", tried.ratio),
        **_parity_fields(tried.parity),
        "explains": tried.explains,
    }


def _sweep_row(key: str, point: SweepPoint) -> CsvRow:
    return {
        "key": key,
        "value": point.value,
        "batch_size": point.batch_size,
        **_interval_fields("images_per_s", point.images_per_s),
        **_spread_fields(point.spread),
        "step_s": point.step_s,
        "data_wait_s": point.data_wait_s,
        "epoch_s": point.epoch_s,
        "bottleneck": point.bottleneck,
        "error": point.error,
        **{f"stage_{name}_s": value for name, value in point.stages.items()},
    }


def _parity_fields(parity: ParityResult | None) -> CsvRow:
    return {
        "parity": parity.verdict if parity else None,
        "loss": parity.loss if parity else None,
        "loss_below": parity.loss_below if parity else None,
        **_interval_fields("loss_gap", parity.gap if parity else None),
    }


def _interval_fields(name: str, interval: Interval | None) -> CsvRow:
    value, low, high, n = (
        (interval.value, interval.low, interval.high, interval.n) if interval else (None, None, None, None)
    )
    return {name: value, f"{name}_low": low, f"{name}_high": high, f"{name}_n": n}


def _spread_fields(spread: tuple[float, float] | None) -> CsvRow:
    low, high = spread or (None, None)
    return {"images_per_s_lowest": low, "images_per_s_highest": high}


def _join_arguments(arguments: Sequence[str]) -> str:
    return shlex.join(arguments)
