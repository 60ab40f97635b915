"""Build the page of weak or strong scaling."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from paceline.core.experiments.scaling import ScalePoint, ScaleResult
from paceline.core.interval import Interval
from paceline.core.units import count, share
from paceline.report.blocks import (
    Block,
    Cell,
    Chart,
    Charts,
    Column,
    Figure,
    Line,
    Page,
    Paragraph,
    Section,
    Table,
    Tone,
)
from paceline.report.experiments.curves import measured, plain, times
from paceline.report.experiments.frame import MANY, SURE, Told
from paceline.report.sections import cells, intervals
from paceline.report.words import clean, finite

_TITLES: Final = {"weak": "weak scaling", "strong": "strong scaling"}
_HELD: Final = {
    "weak": "Weak scaling: the batch per rank is fixed, so the global batch grows with the ranks.",
    "strong": "Strong scaling: the global batch is fixed, so the batch per rank shrinks with more ranks.",
}
_EFFICIENCY: Final = (
    "Efficiency is images/s per rank relative to the smallest number of ranks, from pairs of interleaved runs. "
    "Speed-up is ranks times efficiency. Epoch times exclude evaluations. “Exposed” is the share of a step spent "
    "waiting for gradients, “stragglers” the share spent waiting for the slowest rank."
)


def summary(result: ScaleResult) -> Table:
    """Return a row per number of ranks."""
    columns = [Column("ranks"), Column("nodes"), Column("batch"), Column("batch per rank"), Column("images/s")]
    columns += [Column("per epoch")] if _has_epoch(result) else []
    columns += [Column("speed-up"), Column("efficiency"), Column("exposed"), Column("stragglers")]
    columns += [Column("top-1"), Column("against the fewest ranks")] if _has_accuracy(result) else []
    is_wide = any(point.error or result.note(point) for point in result.points)
    columns += [Column("note", is_number=False, is_wide=is_wide)]
    rows = [_point(result, point) for point in result.points]
    return Table("Ranks", columns, rows, MANY, "more ranks")


def scale_page(report: Told, result: ScaleResult) -> Page:
    """Return the report of weak or strong scaling."""
    runs = [(_name(point), point.runs) for point in result.points]
    facts = [
        ("counted steps per run", cells.count(result.steps)),
        ("warm-up steps", cells.count(result.warmup_steps)),
        ("interleaved runs of each", cells.count(result.repeats)),
        ("total time of runs", cells.of_seconds(result.wall_s)),
    ]
    subtitle = [_TITLES[result.mode], f"recipe {result.recipe} {result.recipe_hash}"]
    origin = report.origin(result.command, facts, result.provenance, runs)
    sections = [_speed(result), _waiting(result), _accuracy(result), origin]
    return report.page("Scaling report", _status(result), subtitle, _figures(result), sections)


def _status(result: ScaleResult) -> tuple[str, Tone]:
    failed = sum(bool(point.error) for point in result.points)
    if failed:
        return f"{failed} of {len(result.points)} points failed", "bad" if failed == len(result.points) else "warning"
    if result.caution:
        return "measured, with a caution", "warning"
    return f"{count(len(result.points), 'point')} measured", "good"


def _figures(result: ScaleResult) -> list[Figure]:
    measured_points = [point for point in result.points if point.images_per_s is not None]
    if not measured_points:
        return []
    first, last = measured_points[0], measured_points[-1]
    assert last.images_per_s is not None, last
    rate = last.images_per_s
    figures = [Figure(f"images/s, {_name(last)}", Cell(intervals.rate(rate.value), rate.value), _within(rate))]
    if last.efficiency is not None:
        note = f"over {_name(first)}" + _behind(last.efficiency, lambda each: f"{100 * each:.1f}")
        figures.append(Figure("efficiency", Cell(share(last.efficiency.value), last.efficiency.value), note))
    if last.exposed_share is not None:
        figures.append(
            Figure("waits for gradients", cells.of_share(last.exposed_share), f"share of a step, {_name(last)}")
        )
    if last.straggler_share is not None:
        note = f"share of a step, {_name(last)}"
        figures.append(Figure("waits for stragglers", cells.of_share(last.straggler_share), note))
    return figures


def _speed(result: ScaleResult) -> Section:
    blocks: list[Block] = [Paragraph(f"Caution: {clean(result.caution, 1000)}")] if result.caution else []
    rate = _line("measured", result.points, lambda point: point.images_per_s)
    measured_points = [point for point in result.points if point.images_per_s and finite(point.images_per_s.value)]
    charts = []
    if rate.points:
        charts.append(_chart("Speed", "images/s", [rate, *_ideal(measured_points)], low=None, log_y=True))
    efficiency = _line("efficiency", result.points, _percent)
    if efficiency.points and measured_points and measured_points[0].efficiency is None:
        efficiency = replace(efficiency, points=[(measured_points[0].ranks, 100.0), *efficiency.points])
    if efficiency.points:
        charts.append(_chart("Efficiency", "% of the speed per rank", [efficiency], rule=(100.0, "ideal")))
    blocks += [Charts(charts)] if charts else [cells.missing("No number of ranks was measured.")]
    blocks += [Paragraph(f"{_HELD[result.mode]} {_EFFICIENCY}"), summary(result)]
    return Section("speed", "Speed over ranks", blocks)


def _waiting(result: ScaleResult) -> Section | None:
    lines = [
        plain("exposed", [(point.ranks, _of_100(point.exposed_share)) for point in result.points]),
        plain("stragglers", [(point.ranks, _of_100(point.straggler_share)) for point in result.points]),
    ]
    lines = [line for line in lines if line.points]
    charts = [_chart("Waiting", "% of a step", lines)] if lines else []
    startup = plain("start-up", [(point.ranks, point.startup_s) for point in result.points])
    charts += [_chart("Start-up", "s", [startup])] if startup.points else []
    has_steps = any(point.steps_s is not None for point in result.points)
    columns = [Column("ranks"), Column("per step"), *([Column(count(result.steps, "step"))] if has_steps else [])]
    columns += [Column("waits for gradients"), Column("start-up"), Column("per run")]
    columns += [Column("bottleneck", is_number=False)]
    rows = [
        [cells.count(point.ranks), intervals.maybe_seconds(point.step_s),
         *([intervals.maybe_seconds(point.steps_s)] if has_steps else []), intervals.maybe_seconds(point.exposed_s),
         intervals.maybe_seconds(point.startup_s), intervals.maybe_seconds(point.wall_s),
         intervals.sentence(point.bottleneck)]
        for point in result.points
        if point.step_s is not None
    ]  # fmt: skip
    if not rows:
        return None
    return Section(
        "waiting",
        "Waiting per step",
        [*([Charts(charts)] if charts else []), Table("", columns, rows, MANY, "more ranks")],
    )


def _accuracy(result: ScaleResult) -> Section | None:
    if not _has_accuracy(result):
        return None
    line = _line("top-1", result.points, lambda point: times(point.top1, 100))
    note = "Accuracy of whole runs of the recipe, which shows the cost of larger batches."
    rule = (100 * result.target, "target") if result.target is not None else None
    chart = _chart("Accuracy", "% top-1", [line], low=None, rule=rule)
    return Section("accuracy", "Accuracy over ranks", [Charts([chart]), Paragraph(note)])


def _line(name: str, points: Sequence[ScalePoint], read: Callable[[ScalePoint], Interval | None]) -> Line:
    return measured(name, [(point.ranks, read(point)) for point in points])


def _ideal(points: Sequence[ScalePoint]) -> list[Line]:
    first = points[0]
    assert first.images_per_s is not None, first
    each = first.images_per_s.value / first.ranks
    return [Line("ideal", [(point.ranks, each * point.ranks) for point in points])] if len(points) > 1 else []


def _chart(title: str, unit: str, lines: Sequence[Line], low: float | None = 0.0,
           rule: tuple[float, str] | None = None, *, log_y: bool = False) -> Chart:  # fmt: skip
    return Chart(title, "ranks", unit, lines, low=low, rule=rule, log_x=True, log_y=log_y)


def _percent(point: ScalePoint) -> Interval | None:
    return times(point.efficiency, 100)


def _of_100(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _has_accuracy(result: ScaleResult) -> bool:
    return any(point.top1 is not None for point in result.points)


def _has_epoch(result: ScaleResult) -> bool:
    return any(point.epoch_s is not None for point in result.points)


def _name(point: ScalePoint) -> str:
    ranks = count(point.ranks, "rank")
    return ranks if point.nodes <= 1 else f"{ranks} on {count(point.nodes, 'node')}"


def _within(interval: Interval) -> str:
    if interval.low is None or interval.high is None:
        return "measured once"
    return f"{intervals.rate(interval.low)} to {intervals.rate(interval.high)} {SURE}"


def _behind(interval: Interval, format_bound: Callable[[float], str]) -> str:
    return (
        ""
        if interval.low is None or interval.high is None
        else f", {format_bound(interval.low)} to {format_bound(interval.high)} {SURE}"
    )


def _point(result: ScaleResult, point: ScalePoint) -> list[Cell]:
    efficiency, speedup = intervals.of_share(point.efficiency), intervals.of_ratio(point.speedup)
    if point is result.base:  # exact by definition
        efficiency, speedup = Cell("100 %"), Cell(f"{point.ranks:.2f}x")
    return [
        cells.count(point.ranks),
        cells.count(point.nodes),
        cells.count(point.batch_size),
        cells.count(point.rank_batch),
        intervals.of_rate(point.images_per_s),
        *([intervals.maybe_seconds(point.epoch_s)] if _has_epoch(result) else []),
        speedup,
        efficiency,
        intervals.maybe_share(point.exposed_share),
        intervals.maybe_share(point.straggler_share),
        *([intervals.of_accuracy(point.top1), intervals.of_points(point.top1_gap)] if _has_accuracy(result) else []),
        intervals.sentence(point.error or result.note(point) or point.bottleneck),
    ]
