"""Build the page of a comparison: findings, tables of groups, curves and differing settings."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import isclose
from typing import Final

from paceline import __version__
from paceline.core.interval import Interval
from paceline.core.units import count
from paceline.report.blocks import Block, Cell, Column, Figure, Page, Paragraph, Section, Table
from paceline.report.compare.curves import curves
from paceline.report.compare.judge import group
from paceline.report.compare.read import Trained
from paceline.report.compare.result import CompareResult, GroupResult
from paceline.report.compare.sentences import called_metric, level, pace_by
from paceline.report.sections import cells, intervals

_NOT_REACHED: Final = Cell("not reached")
_REFERENCE: Final = Cell("1.00x", 1.0)


def build_page(result: CompareResult, runs: Sequence[Trained]) -> Page:
    """Return the page of a comparison of `runs`, the runs of `result`."""
    drawn = list(zip(_labels(result), group(runs), strict=True))
    num_runs = count(len(runs), "run")
    sections = [
        Section("below", "Below the threshold", [*map(Paragraph, result.failures)]),
        Section("found", "Findings", [*map(Paragraph, result.sentences)]),
        Section("upkeep", "Notes", [*map(Paragraph, result.notes)]),
        Section("groups", "Groups of runs", [*_tables(result, hours_heading(runs))]),
        Section("curves", "Curves", [*curves(drawn, result.target, result.metric)]),
        Section("settings", "Settings that differ", [_settings(result)]),
        Section("runs", "Runs", [_runs(result)]),
    ]
    return Page(
        title=f"{num_runs} compared",
        subtitle=[count(len(result.groups), "group"), f"the first is {result.groups[0].name}"],
        status="below the threshold" if result.failures else num_runs,
        tone="bad" if result.failures else "good",
        figures=list(_figures(result)),
        verdict=None,
        notices=[count(len(result.notes), "note")] if result.notes else [],
        problems=(),
        sections=[section for section in sections if section.blocks],
        paceline=__version__,
        about="Comparison",
        source="the runs' directories",
    )


def hours_heading(runs: Sequence[Trained]) -> str:
    """Return the heading of rank-hours: GPU-hours if all runs used GPUs."""
    return "GPU-hours" if all(run.has_gpu for run in runs) else "rank-hours"


def _figures(result: CompareResult) -> Iterator[Figure]:
    for each in result.groups[1:5]:
        if each.speedup is not None and result.target is not None:
            note = f"as fast to {level(result.target)} as {result.groups[0].name}"
            yield Figure(each.name, Cell(f"{each.speedup.value:.2f}x", each.speedup.value), note)


def _tables(result: CompareResult, hours: str) -> Iterator[Block]:
    if result.target is not None:
        yield Table(f"Reaching {level(result.target)} ({origin(result)})", _REACHING, _rows(result, reaching))
    elif result.target_from == "chance":
        yield cells.missing("No run has learned: there is no target to reach.")
    else:
        yield cells.missing("No run was evaluated: there is no target to reach.")
    title = f"{called_metric(result.metric).capitalize()} at the end{order(result)}"
    yield Table(title, (*_ENDING, Column(hours)), _rows(result, ending))


def order(result: CompareResult) -> str:
    """Return how tables are sorted, as the end of a title; "" for the given order."""
    return "" if result.all_reach or len(result.groups) == 1 else ", the highest first"


_REACHING: Final = (
    Column("group", is_number=False),
    Column("reached"),
    Column("time"),
    Column("epochs"),
    Column("speed-up"),
    Column("by images/s"),
    Column("by images needed"),
)
_ENDING: Final = (
    Column("group", is_number=False),
    Column("last"),
    Column("best"),
    Column("loss"),
    Column("against the first"),
    Column("images/s"),
)


def _labels(result: CompareResult) -> list[str]:
    # Charts have room for the start of a name only, so number the groups.
    return [f"{number}: {each.name}" for number, each in enumerate(result.groups, start=1)]


def _rows(result: CompareResult, cells_of: Callable[[GroupResult, bool], list[Cell]]) -> list[list[Cell]]:
    labels = _labels(result)
    return [[Cell(labels[index]), *cells_of(result.groups[index], index == 0)[1:]] for index in result.ranked]


def reaching(group_result: GroupResult, is_first: bool) -> list[Cell]:
    """Return a group's name, number of runs that reach the target, time, epochs, speed-up and its factors."""
    reached = Cell(f"{group_result.reached} of {len(group_result.runs)}", group_result.reached)
    if not group_result.reached:
        return [Cell(group_result.name), reached, _NOT_REACHED, *[intervals.NOTHING] * 4]
    ratios = [_REFERENCE] * 3
    if not is_first:
        ratios = [
            intervals.of_ratio(_told(each))
            for each in (group_result.speedup, group_result.hardware, group_result.statistical)
        ]
        ratios[1] = _caused(ratios[1], pace_by(group_result))
    took = [
        intervals.of_seconds(_told(group_result.to_target_s)),
        intervals.of_number(_told(group_result.to_target_epochs)),
    ]
    return [Cell(group_result.name), reached, *took, *ratios]


def ending(group_result: GroupResult, is_first: bool) -> list[Cell]:
    """Return a group's name, last and best accuracy, loss, gap to the first, throughput and hours."""
    return [
        Cell(group_result.name),
        intervals.of_accuracy(_told(group_result.accuracy)),
        intervals.of_accuracy(_told(group_result.best)),
        _loss(_told(group_result.loss)),
        Cell("the first") if is_first else _gap(group_result),
        intervals.of_rate(_told(group_result.images_per_s)),
        intervals.of_number(_told(group_result.gpu_hours)),
    ]


def _caused(ratio: Cell, by: str) -> Cell:
    why = {
        "starved": "CPU-starved",
        "hardware": "other hardware",
        "mixed": "other hardware and settings",
        "noise": "noise",
        "scatter": "within noise",
    }.get(by, "")
    return replace(ratio, note=", ".join(filter(None, (ratio.note, why))))


def _loss(interval: Interval | None) -> Cell:
    cell = cells.loss(None if interval is None else interval.value)
    if interval is None or interval.low is None or interval.high is None:
        return cell
    return replace(cell, note=f"{interval.low:,.4f} to {interval.high:,.4f}")


def _told(interval: Interval | None) -> Interval | None:
    # Equal measurements, such as epochs, have an interval of width 0.
    if (
        interval is None
        or interval.low is None
        or interval.high is None
        or not isclose(interval.low, interval.high, rel_tol=1e-6)
    ):
        return interval
    return Interval(value=interval.value, n=interval.n)


def _gap(group_result: GroupResult) -> Cell:
    if group_result.gap is None:
        return intervals.NOTHING
    gap = group_result.gap
    is_known = gap.low is not None and gap.high is not None
    bounds = f"{100 * (gap.low or 0):+.2f} to {100 * (gap.high or 0):+.2f}" if is_known else ""
    return Cell(f"{100 * gap.value:+.2f} points", gap.value, note=bounds)


def origin(result: CompareResult) -> str:
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


def _settings(result: CompareResult) -> Block:
    paths = dict.fromkeys(path for each in result.groups for path in each.settings)
    if not paths:
        return cells.missing("No settings differ except the seed.")
    columns = [Column("setting", is_number=False), *(Column(label, is_number=False) for label in _labels(result))]
    rows = [
        [Cell(path, is_code=True), *(Cell(each.settings.get(path, "-")) for each in result.groups)] for path in paths
    ]
    return Table("", columns, rows)


def _runs(result: CompareResult) -> Table:
    first_columns = [Column("run", is_number=False), Column("group"), Column("status", is_number=False)]
    columns = [*first_columns, *map(Column, ("seed", "accuracy", "best", "loss", "to target", "images/s"))]
    rows = [
        [
            cells.text(run.path),
            cells.count(number),
            Cell(run.status.replace("_", " ")),
            Cell("") if run.seed is None else Cell(str(run.seed), run.seed),
            cells.of_accuracy(run.accuracy),
            cells.of_accuracy(run.best),
            cells.loss(run.loss),
            intervals.maybe_seconds(run.to_target_s),
            cells.plain(run.images_per_s),
        ]
        for number, run in ((index + 1, run) for index in result.ranked for run in result.groups[index].runs)
    ]
    return Table("", columns, rows, num_open=20, more="more runs")
