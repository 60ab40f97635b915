"""Build the page of a comparison: findings, tables of groups and curves of runs."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, zip_longest
from math import isclose
from statistics import fmean
from typing import Final

from paceline import __version__
from paceline.core.metric import metric_label, top_k
from paceline.core.statistics import Interval
from paceline.core.units import count
from paceline.report import cells
from paceline.report.cells import choose_time_unit
from paceline.report.charts import MAX_LINES, NUM_LINE_STYLES
from paceline.report.compare_findings import format_target, shown_speed_cause
from paceline.report.compare_model import ComparedRun, CompareResult, EvalPoint, GroupResult
from paceline.report.compare_runs import group_runs
from paceline.report.document import (
    Block,
    Chart,
    ChartLine,
    ChartRow,
    KeyFigure,
    PageSection,
    Paragraph,
    ReportPage,
    Table,
    TableCell,
    TableColumn,
)
from paceline.report.experiment_common import Column, Record, ResultRows, drawn_charts
from paceline.report.series import Point, downsample_points

_MAX_CURVE_POINTS = 300
_GAP_NOTE: Final = (
    "The generalization gap is the validation loss minus the training loss. The training loss is the mean over the "
    "steps since the previous evaluation, on augmented images and with the recipe's label smoothing. With "
    "train.eval_train=on it is that of training images, evaluated like validation images."
)
NamedRuns = Sequence[tuple[str, Sequence[ComparedRun]]]
_GROUP_COLUMNS: Final = (
    Column("group", "group"),
    Column("shown_reached", "reached", cells.as_is),
    Column("to_target_s", "time", cells.as_is),
    Column("to_target_epochs", "epochs", cells.number_cell),
    Column("speedup", "speed-up", cells.ratio_cell),
    Column("hardware", "by images/s", cells.as_is),
    Column("statistical", "by images needed", cells.ratio_cell),
    Column("accuracy", "last", cells.accuracy_cell),
    Column("best", "best", cells.accuracy_cell),
    Column("loss", "loss", cells.loss_cell),
    Column("gap", "against the first", cells.as_is),
    Column("images_per_s", "images/s", cells.rate_cell),
    Column("energy_kwh", "kWh", cells.number_cell),
    Column("cost", "cost", cells.number_cell),
)
_RUN_COLUMNS: Final = (
    Column("path", "run"),
    Column("number", "group", cells.count_cell),
    Column("status", "status"),
    Column("seed", "seed", cells.count_cell),
    Column("accuracy", "accuracy", cells.accuracy_cell),
    Column("best", "best", cells.accuracy_cell),
    Column("loss", "loss", cells.loss_cell),
    Column("to_target_s", "to target", cells.seconds_cell),
    Column("images_per_s", "images/s", cells.number_cell),
)


def build_compare_page(result: CompareResult, runs: Sequence[ComparedRun]) -> ReportPage:
    """Return the page of `result`, the comparison of `runs`."""
    drawn = list(zip(_group_labels(result), group_runs(runs), strict=True))
    findings, notes = [*map(Paragraph, result.sentences)], [*map(Paragraph, result.notes)]
    groups = [*_group_tables(result, "GPU-hours" if all(run.has_gpu for run in runs) else "rank-hours")]
    settings, runs_table = _settings_block(result), _runs_table(result)
    sections = [
        PageSection("below", "Below the threshold", [*map(Paragraph, result.failures)]),
        PageSection("found", "Findings", findings),
        PageSection("settings", "Settings that differ", [settings]),
        PageSection("upkeep", "Notes", notes),
        PageSection("groups", "Groups of runs", groups),
        PageSection("curves", "Curves", [*build_curves(drawn, result.target, result.metric)]),
        PageSection("runs", "Runs", [runs_table]),
    ]
    return ReportPage(
        title=f"{count(len(runs), 'run')} compared",
        subtitle=[f"the first is {result.groups[0].name}"],
        status="below the threshold" if result.failures else count(len(result.groups), "group"),
        tone="bad" if result.failures else "good",
        figures=list(_speedup_figures(result)),
        notices=[count(len(result.notes), "note")] if result.notes else [],
        sections=[section for section in sections if section.blocks],
        paceline=__version__,
        about="Comparison",
        source="the runs' directories",
        summary=[*groups, replace(runs_table, title="Runs"), settings, *findings, *notes],
    )


def build_curves(groups: NamedRuns, target: float | None, metric: str) -> Iterator[Block]:
    """Yield the charts of runs in named groups, and notes."""
    runs = _choose_drawn_runs(groups)
    gaps = drawn_charts([*_train_val_charts(groups, metric), _gap_chart(runs)])
    charts = [*drawn_charts([*_accuracy_charts(runs, target, metric), *_loss_charts(runs)]), *gaps]
    if charts:
        yield ChartRow(charts)
        if gaps:
            yield Paragraph(_GAP_NOTE)
    else:
        yield cells.missing_paragraph("There are no curves: no run was evaluated or logged a step.")
    num_runs = sum(len(members) for _, members in groups)
    if num_runs > len(runs):
        yield cells.missing_paragraph(f"{len(runs)} of the {num_runs} runs are drawn, equally many per group.")


def _choose_drawn_runs(groups: NamedRuns) -> list[tuple[str, ComparedRun]]:
    # Round-robin, so that every group has curves if there are too many runs.
    turns = zip_longest(*([(name, run) for run in members] for name, members in groups))
    chosen = [each for each in chain.from_iterable(turns) if each is not None][:MAX_LINES]
    order = {name: index for index, (name, _) in enumerate(groups)}
    return sorted(chosen, key=lambda each: order[each[0]])


def _accuracy_charts(runs: Sequence[tuple[str, ComparedRun]], target: float | None, metric: str) -> Iterator[Chart]:
    longest_s = max((each.trained_s for _, run in runs for each in run.evals), default=0.0)
    clock = choose_time_unit(longest_s)
    rule = None if target is None else (100 * target, format_target(target))
    title = _capitalize(_accuracy_label(metric))
    axes: list[tuple[str, str, Callable[[EvalPoint], float]]] = [
        ("over time", f"trained, {clock.unit}", lambda each: clock.convert(each.trained_s)),
        ("over epochs", "epoch", lambda each: each.epoch),
    ]
    for over, x_label, at in axes:
        lines = [
            _run_line(name, run, runs, [(at(each), 100 * each.accuracy) for each in run.evals if at(each)], marked=True)
            for name, run in runs
        ]
        yield Chart(f"{title} {over}", x_label, "%", lines, low=None, rule=rule)


def _loss_charts(runs: Sequence[tuple[str, ComparedRun]]) -> Iterator[Chart]:
    over = "epoch" if all(run.steps.has_key("epoch") for _, run in runs if run.steps.num_records) else "step"
    lines = [_run_line(name, run, runs, run.steps.xy_points(over, "loss")) for name, run in runs]
    yield Chart("Training loss", over, "cross-entropy", lines)
    lines = [_run_line(name, run, runs, _val_losses(run), marked=True) for name, run in runs]
    yield Chart("Validation loss", "epoch", "cross-entropy", lines)


def _train_val_charts(groups: NamedRuns, metric: str) -> Iterator[Chart]:
    """Yield learning curves of each group's first run."""
    first = [(name, members[0]) for name, members in groups if members][: MAX_LINES // 2]
    are_alone = all(len(members) == 1 for _, members in groups)
    note = "dashed: training" if are_alone else "dashed: training, of each group's first run"
    losses = [(name, _val_losses(run), _train_losses(run)) for name, run in first]
    accuracies = [
        (name, _epoch_points(run, "accuracy", 100), _epoch_points(run, "train_accuracy", 100)) for name, run in first
    ]
    for title, unit, low, curves in (
        ("Training and validation loss", "cross-entropy", 0.0, losses),
        (f"Training and validation, {_accuracy_label(metric)}", "%", None, accuracies),
    ):
        lines = [line for curve in curves for line in _group_lines(*curve) if line.points]
        if any(line.is_dashed for line in lines) and not all(line.is_dashed for line in lines):
            yield Chart(title, "epoch", unit, lines, low=low, note=note)


def _gap_chart(runs: Sequence[tuple[str, ComparedRun]]) -> Chart:
    lines = [_run_line(name, run, runs, _generalization_gap(run), marked=True) for name, run in runs]
    return Chart("Generalization gap", "epoch", "cross-entropy", lines, rule=(0.0, "none"))


def _generalization_gap(run: ComparedRun) -> list[Point]:
    steps = sorted(run.steps.xy_points("epoch", "loss"))
    start, gaps = 0, []
    for each in run.evals:
        end = bisect_right(steps, each.epoch, key=lambda step: step[0])
        since = [loss for _, loss in steps[start:end]]
        training = each.train_loss if each.train_loss is not None else fmean(since) if since else None
        if each.epoch and each.loss is not None and training is not None:
            gaps.append((each.epoch, each.loss - training))
        start = end
    return gaps


def _val_losses(run: ComparedRun) -> list[Point]:
    return _epoch_points(run, "loss")


def _train_losses(run: ComparedRun) -> Sequence[Point]:
    return _epoch_points(run, "train_loss") or run.steps.xy_points("epoch", "loss")


def _epoch_points(run: ComparedRun, key: str, scale: float = 1) -> list[Point]:
    points = [(each.epoch, getattr(each, key)) for each in run.evals]
    return [(epoch, scale * value) for epoch, value in points if epoch and value is not None]


def _group_lines(group: str, validation: Sequence[Point], training: Sequence[Point]) -> Iterator[ChartLine]:
    for split, points in (("validation", validation), ("training", training)):
        yield ChartLine(
            f"{group}, {split}",
            downsample_points(points, _MAX_CURVE_POINTS),
            has_markers=split == "validation",
            group=group,
            label=_group_number(group),
            is_dashed=split == "training",
        )


def _run_line(
    name: str,
    run: ComparedRun,
    runs: Sequence[tuple[str, ComparedRun]],
    points: Sequence[Point],
    *,
    marked: bool = False,
) -> ChartLine:
    # Name the seed only if the group has several runs.
    is_alone = sum(other == name for other, _ in runs) == 1
    seed = "" if is_alone or run.seed is None else f", seed {run.seed}"
    label = _group_number(name) + (seed if len(runs) <= NUM_LINE_STYLES else "")
    return ChartLine(
        name + seed, downsample_points(points, _MAX_CURVE_POINTS), has_markers=marked, group=name, label=label
    )


def _group_number(name: str) -> str:
    # The number stands for the group's name where there is no room for it.
    return name.partition(":")[0]


def _speedup_figures(result: CompareResult) -> Iterator[KeyFigure]:
    for each in result.groups[1:5]:
        if each.speedup is not None and result.target is not None:
            note = f"as fast to {format_target(result.target)} as {result.groups[0].name}"
            yield KeyFigure(each.name, TableCell(f"{each.speedup.value:.2f}x", each.speedup.value), note)


def _group_tables(result: CompareResult, hours: str) -> Iterator[Block]:
    columns = (*_GROUP_COLUMNS, Column("gpu_hours", hours, cells.number_cell))
    labels = _group_labels(result)
    records = [_group_record(labels[index], result.groups[index], index == 0) for index in result.ranked_indices]
    rows = ResultRows(columns, records, more="more groups")
    if result.target is not None:
        title = f"Reaching {format_target(result.target)} ({_describe_target_origin(result)})"
        yield rows.table("group shown_reached to_target_s to_target_epochs speedup hardware statistical", title=title)
    elif result.target_from == "chance":
        yield cells.missing_paragraph("No run has learned: there is no target to reach.")
    else:
        yield cells.missing_paragraph("No run was evaluated: there is no target to reach.")
    title = f"{_capitalize(metric_label(result.metric))} at the end{_describe_order(result)}"
    yield rows.table("group accuracy best loss gap images_per_s gpu_hours energy_kwh cost", title=title)


def _accuracy_label(metric: str) -> str:
    return f"{metric_label(metric)} accuracy" if top_k(metric) else metric_label(metric)


def _capitalize(text: str) -> str:
    return text[0].upper() + text[1:]  # not `str.capitalize`, which makes AUROC Auroc


def _describe_order(result: CompareResult) -> str:
    """Return the end of a table's title that tells how it is sorted."""
    return "" if result.all_reach_target or len(result.groups) == 1 else ", the highest first"


def _group_labels(result: CompareResult) -> list[str]:
    # Charts have room for the start of a name only, so number the groups.
    return [f"{number}: {each.name}" for number, each in enumerate(result.groups, start=1)]


def _group_record(label: str, group: GroupResult, is_first: bool) -> Record:
    record: Record = {
        key: _without_trivial_bounds(value) if isinstance(value, Interval) else value for key, value in group
    }
    record |= {"group": label, "shown_reached": TableCell(f"{group.reached} of {len(group.runs)}", group.reached)}
    record["to_target_s"] = cells.seconds_cell(record["to_target_s"]) if group.reached else TableCell("not reached")
    record["gap"] = TableCell("the first") if is_first else cells.points_cell(group.gap)
    record["hardware"] = _with_cause(cells.ratio_cell(record["hardware"]), shown_speed_cause(group))
    if is_first and group.reached:
        record |= {"speedup": 1.0, "statistical": 1.0, "hardware": cells.ratio_cell(1.0)}
    return record


def _with_cause(ratio: TableCell, by: str) -> TableCell:
    why = {
        "starved": "CPU-starved",
        "hardware": "other hardware",
        "mixed": "other hardware and settings",
        "noise": "noise",
        "scatter": "within noise",
    }.get(by, "")
    return replace(ratio, note=", ".join(filter(None, (ratio.note, why))))


def _without_trivial_bounds(interval: Interval | None) -> Interval | None:
    # Equal measurements, such as epochs, have an interval of width 0.
    if (
        interval is None
        or interval.low is None
        or interval.high is None
        or not isclose(interval.low, interval.high, rel_tol=1e-6)
    ):
        return interval
    return Interval(value=interval.value, n=interval.n)


def _describe_target_origin(result: CompareResult) -> str:
    """Return the origin of the target as text."""
    match result.target_from:
        case "asked":
            return "as requested"
        case "recipes":
            return "at which the recipes stop"
        case "lowest_learnt":
            return "the highest that all runs that learned reach"
        case _:
            return "the highest that all runs reach"


def _settings_block(result: CompareResult) -> Block:
    paths = dict.fromkeys(path for each in result.groups for path in each.settings)
    if not paths:
        return cells.missing_paragraph("No settings differ except the seed.")
    columns = [
        TableColumn("setting", is_number=False),
        *(TableColumn(label, is_number=False) for label in _group_labels(result)),
    ]
    rows = [
        [TableCell(path, is_code=True), *(TableCell(each.settings.get(path, "-")) for each in result.groups)]
        for path in paths
    ]
    return Table("Settings", columns, rows)


def _runs_table(result: CompareResult) -> Table:
    records = [
        {**dict(run), "number": index + 1, "status": run.status.replace("_", " ")}
        for index in result.ranked_indices
        for run in result.groups[index].runs
    ]
    return ResultRows(_RUN_COLUMNS, records, more="more runs").table(*(column.key for column in _RUN_COLUMNS))
