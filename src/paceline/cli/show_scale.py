"""Print a scaling study: a table for people, `experiment.json` for programs."""

import shlex
from collections.abc import Callable, Sequence

from paceline.cli.tables import print_table
from paceline.core.experiments.folder import ExperimentDir
from paceline.core.experiments.scaling import BatchPoint, ScalePoint, ScaleResult
from paceline.core.interval import Interval
from paceline.core.units import accuracy, count, milliseconds, number, seconds, share
from paceline.data.sources.places import printable
from paceline.lab.predict.points import POINTS_FILE
from paceline.report.experiments.batches import build_curves_command

_BLANK = "-"
_TEXT_COLUMNS = ("bottleneck", "warm-up", "rule")
_NUM_KEY_COLUMNS = 3
"""Columns that identify a row of a batch-size study: batch size, warm-up and rule."""


def show_scale(result: ScaleResult, folder: ExperimentDir, *, as_json: bool) -> None:
    """Print the result, and its folder."""
    if as_json:
        print(result.model_dump_json(indent=2))
        return
    if result.mode == "batch":
        _print_batches(result)
    else:
        _print_points(result)
    if result.caution:
        print(f"caution: {result.caution}")
    print(f"folder: {printable(folder.path)}")
    if any(point.runs for point in result.batches):
        print(f"learning curves: {printable(build_curves_command(folder.path, result.target))}")
    measured = [point for point in result.points if point.images_per_s is not None]
    if len(measured) > 1:
        print(f"to predict more ranks: {_prediction_command(result, measured, folder)}")
    if folder.report.is_file():
        print(f"report: {printable(folder.report)}")


def _prediction_command(result: ScaleResult, measured: Sequence[ScalePoint], folder: ExperimentDir) -> str:
    """Return the command that predicts an epoch on four times as many ranks.

    The points are speeds: their images are those of one second. In strong scaling the global batch size stays, so the
    rank batch shrinks.
    """
    most = max(measured, key=lambda point: point.ranks)
    at, a_node = 4 * most.ranks, max(point.ranks // point.nodes for point in measured)
    path = shlex.quote(printable(folder.path / POINTS_FILE))
    command = f"paceline scale --predict --points {path} --at {at} --ranks-per-node {a_node}"
    if result.mode == "strong":
        command += f" --rank-batch {max(1, most.batch_size // at)}"
    return command + ("" if result.epoch_images is None else f" --images {result.epoch_images:.0f}")


def _print_points(result: ScaleResult) -> None:
    """Print gains and step times in two tables: one would be wider than many terminals."""
    points = result.points
    has_top1 = any(point.top1 is not None for point in points)
    repeats_text = count(result.repeats, "repeat") if result.steps else f"full runs of {count(result.repeats, 'seed')}"
    measured = [point for point in points if point.images_per_s is not None]
    rows = [_gain_cells(result, point, has_top1=has_top1) for point in points]
    headings = ["ranks", "batch", "images/s", "speed-up", "efficiency", *(["top-1", "points"] if has_top1 else [])]
    print_table(f"{result.mode} scaling of {result.recipe} ({repeats_text})", headings, rows)
    has_epoch, has_steps = (
        any(getattr(point, name) is not None for point in points) for name in ("epoch_s", "steps_s")
    )
    headings = ["ranks", *(["epoch"] if has_epoch else []), *([count(result.steps, "step")] if has_steps else [])]
    headings += ["step", "exposed", "stragglers", "bottleneck"]
    if measured:
        rows = [_time_cells(point, has_epoch=has_epoch, has_steps=has_steps) for point in measured]
        print_table("time per step, and what it waits for", headings, rows, text_columns=_TEXT_COLUMNS)
    _print_notes([(_ranks_cell(point), _point_note(result, point)) for point in points])


def _gain_cells(result: ScaleResult, point: ScalePoint, *, has_top1: bool) -> Sequence[str]:
    efficiency = "100 %" if point is result.base else _with_bounds(point.efficiency, share)
    speedup = point.ranks if point is result.base else point.speedup and point.speedup.value
    shown = [_ranks_cell(point), f"{point.batch_size:,}", _with_bounds(point.images_per_s, _rate_cell)]
    shown += [_BLANK if speedup is None else f"{speedup:,.2f}x", efficiency]
    return [*shown, *([_with_bounds(point.top1, accuracy), _top1_gap_cell(point)] if has_top1 else [])]


def _top1_gap_cell(point: ScalePoint) -> str:
    """Return the accuracy difference to the smallest rank count, in percentage points."""
    return _with_bounds(point.top1_gap, lambda value: f"{100 * value:+.2f}")


def _time_cells(point: ScalePoint, *, has_epoch: bool, has_steps: bool) -> Sequence[str]:
    step = _BLANK if point.step_s is None else milliseconds(point.step_s)
    long = [_seconds_or_blank(point.epoch_s)] if has_epoch else []
    long += [_seconds_or_blank(point.steps_s)] if has_steps else []
    lost = (_share_or_blank(point.exposed_share), _share_or_blank(point.straggler_share))
    return [_ranks_cell(point), *long, step, *lost, point.bottleneck or _BLANK]


def _ranks_cell(point: ScalePoint) -> str:
    return str(point.ranks) + (f" on {count(point.nodes, 'node')}" if point.nodes > 1 else "")


def _point_note(result: ScaleResult, point: ScalePoint | BatchPoint) -> str:
    return f"failed: {point.error}" if point.error else result.note(point)


def _print_notes(notes: Sequence[tuple[str, str]]) -> None:
    for name, note in notes:
        if note:
            print(f"{name}: {note}")


def _print_batches(result: ScaleResult) -> None:
    """Print the results of full runs, and with a target when they reached it."""
    batches, target = result.batches, result.target
    has_epoch = any(point.epoch_s is not None for point in batches)
    headings = ["batch", "warm-up", "rule", "peak lr", "top-1", "images/s", *(["epoch"] if has_epoch else [])]
    title = f"batch sizes of {result.recipe} (full runs of {count(result.repeats, 'seed')})"
    rows = [[*_setting_cells(point), *_training_cells(point, has_epoch=has_epoch)] for point in batches]
    print_table(title, headings, rows, text_columns=_TEXT_COLUMNS, num_names=_NUM_KEY_COLUMNS)
    if target is not None:
        headings = ["batch", "warm-up", "rule", "reached", "time", "epochs"]
        rows = [[*_setting_cells(point)[:_NUM_KEY_COLUMNS], *_target_cells(point)] for point in batches]
        print_table(
            f"to {accuracy(target)} top-1", headings, rows, text_columns=_TEXT_COLUMNS, num_names=_NUM_KEY_COLUMNS
        )
    for sentence in result.sentences:
        print(sentence)
    _print_notes(
        [(", ".join(_setting_cells(point)[:_NUM_KEY_COLUMNS]), _point_note(result, point)) for point in batches]
    )


def _setting_cells(point: BatchPoint) -> Sequence[str]:
    return [f"{point.batch_size:,}", point.warmup or _BLANK, point.lr_rule, number(point.lr)]


def _training_cells(point: BatchPoint, *, has_epoch: bool) -> Sequence[str]:
    epoch = [_seconds_or_blank(point.epoch_s)] if has_epoch else []
    return [_with_bounds(point.top1, accuracy), _with_bounds(point.images_per_s, _rate_cell), *epoch]


def _target_cells(point: BatchPoint) -> Sequence[str]:
    times = (_with_bounds(point.to_target_s, seconds), _with_bounds(point.to_target_epochs, number))
    return [f"{point.reached} of {point.seeds}", *times]


def _with_bounds(interval: Interval | None, format_value: Callable[[float], str]) -> str:
    if interval is None:
        return _BLANK
    if interval.low is None or interval.high is None:
        return format_value(interval.value)
    low, high = (format_value(each).removesuffix(" %") for each in (interval.low, interval.high))  # print the unit once
    return f"{format_value(interval.value)} ({low} to {high})"


def _rate_cell(value: float) -> str:
    return f"{value:,.0f}"


def _seconds_or_blank(value_s: float | None) -> str:
    return _BLANK if value_s is None else seconds(value_s)


def _share_or_blank(value: float | None) -> str:
    return _BLANK if value is None else share(value)
