"""Build the pages of weak and strong scaling and of batch-size studies."""

import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from paceline.core.experiments.results import BatchPoint, ScalePoint, ScaleResult
from paceline.core.statistics import Interval
from paceline.core.units import accuracy, count, number, share
from paceline.report import cells
from paceline.report.document import (
    Block,
    Chart,
    ChartLine,
    ChartRow,
    Command,
    KeyFigure,
    PageSection,
    Paragraph,
    ReportPage,
    Table,
    TableCell,
    TableColumn,
    Tone,
)
from paceline.report.experiment_common import (
    CONFIDENCE_TEXT,
    MAX_OPEN_ROWS,
    ExperimentReport,
    measured_line,
    plain_line,
    scale_interval,
)
from paceline.report.text import clean_text, finite_or_none

_MODE_LABELS: Final = {"weak": "weak scaling", "strong": "strong scaling"}
_MODE_NOTES: Final = {
    "weak": "Weak scaling: the batch per rank is fixed, so the global batch grows with the ranks.",
    "strong": "Strong scaling: the global batch is fixed, so the batch per rank shrinks with more ranks.",
}
_EFFICIENCY_NOTE: Final = (
    "Efficiency is images/s per rank relative to the smallest number of ranks, from pairs of interleaved runs. "
    "Speed-up is ranks times efficiency. Epoch times exclude evaluations. “Exposed” is the share of a step spent "
    "waiting for gradients, “stragglers” the share spent waiting for the slowest rank."
)
_ANY_RULE: Final = "any"
_RULE_LABELS: Final = {"none": "LR as it is", "sqrt": "LR by the root", "linear": "linear LR"}


def scaling_table(result: ScaleResult) -> Table:
    """Return a row per number of ranks."""
    columns = [
        TableColumn("ranks"),
        TableColumn("nodes"),
        TableColumn("batch"),
        TableColumn("batch per rank"),
        TableColumn("images/s"),
    ]
    columns += [TableColumn("per epoch")] if _has_epoch(result) else []
    columns += [TableColumn("speed-up"), TableColumn("efficiency"), TableColumn("exposed"), TableColumn("stragglers")]
    columns += [TableColumn("top-1"), TableColumn("against the fewest ranks")] if _has_accuracy(result) else []
    is_wide = any(point.error or result.note(point) for point in result.points)
    columns += [TableColumn("note", is_number=False, is_wide=is_wide)]
    rows = [_ranks_row(result, point) for point in result.points]
    return Table("Ranks", columns, rows, MAX_OPEN_ROWS, "more ranks")


def build_scaling_page(report: ExperimentReport, result: ScaleResult) -> ReportPage:
    """Return the report of weak or strong scaling."""
    runs = [(_ranks_name(point), point.runs) for point in result.points]
    facts = [
        ("counted steps per run", cells.count_cell(result.steps)),
        ("warm-up steps", cells.count_cell(result.warmup_steps)),
        ("interleaved runs of each", cells.count_cell(result.repeats)),
        ("total time of runs", cells.seconds_cell(result.wall_s)),
    ]
    subtitle = [_MODE_LABELS[result.mode], f"recipe {result.recipe} {result.recipe_hash}"]
    origin = report.build_provenance(result.command, facts, result.provenance, runs)
    sections = [_speed_section(result), _waiting_section(result), _accuracy_section(result), origin]
    return report.build_page("Scaling report", _scaling_status(result), subtitle, _scaling_figures(result), sections)


def _scaling_status(result: ScaleResult) -> tuple[str, Tone]:
    failed = sum(bool(point.error) for point in result.points)
    if failed:
        return f"{failed} of {len(result.points)} points failed", "bad" if failed == len(result.points) else "warning"
    if result.caution:
        return "measured, with a caution", "warning"
    return f"{count(len(result.points), 'point')} measured", "good"


def _scaling_figures(result: ScaleResult) -> list[KeyFigure]:
    measured_points = [point for point in result.points if point.images_per_s is not None]
    if not measured_points:
        return []
    first, last = measured_points[0], measured_points[-1]
    assert last.images_per_s is not None, last
    rate = last.images_per_s
    figures = [
        KeyFigure(
            f"images/s, {_ranks_name(last)}",
            TableCell(cells.format_rate(rate.value), rate.value),
            _interval_text(rate),
        )
    ]
    if last.efficiency is not None:
        note = f"over {_ranks_name(first)}" + _interval_suffix(last.efficiency, lambda each: f"{100 * each:.1f}")
        figures.append(KeyFigure("efficiency", TableCell(share(last.efficiency.value), last.efficiency.value), note))
    if last.exposed_share is not None:
        figures.append(
            KeyFigure(
                "waits for gradients", cells.share_cell(last.exposed_share), f"share of a step, {_ranks_name(last)}"
            )
        )
    if last.straggler_share is not None:
        note = f"share of a step, {_ranks_name(last)}"
        figures.append(KeyFigure("waits for stragglers", cells.share_cell(last.straggler_share), note))
    return figures


def _speed_section(result: ScaleResult) -> PageSection:
    blocks: list[Block] = [Paragraph(f"Caution: {clean_text(result.caution, 1000)}")] if result.caution else []
    rate = _points_line("measured", result.points, lambda point: point.images_per_s)
    measured_points = [
        point for point in result.points if point.images_per_s and finite_or_none(point.images_per_s.value)
    ]
    charts = []
    if rate.points:
        charts.append(_ranks_chart("Speed", "images/s", [rate, *_ideal_lines(measured_points)], low=None, log_y=True))
    efficiency = _points_line("efficiency", result.points, _efficiency_percent)
    if efficiency.points and measured_points and measured_points[0].efficiency is None:
        efficiency = replace(efficiency, points=[(measured_points[0].ranks, 100.0), *efficiency.points])
    if efficiency.points:
        charts.append(_ranks_chart("Efficiency", "% of the speed per rank", [efficiency], rule=(100.0, "ideal")))
    blocks += [ChartRow(charts)] if charts else [cells.missing_paragraph("No number of ranks was measured.")]
    blocks += [Paragraph(f"{_MODE_NOTES[result.mode]} {_EFFICIENCY_NOTE}"), scaling_table(result)]
    return PageSection("speed", "Speed over ranks", blocks)


def _waiting_section(result: ScaleResult) -> PageSection | None:
    lines = [
        plain_line("exposed", [(point.ranks, _to_percent(point.exposed_share)) for point in result.points]),
        plain_line("stragglers", [(point.ranks, _to_percent(point.straggler_share)) for point in result.points]),
    ]
    lines = [line for line in lines if line.points]
    charts = [_ranks_chart("Waiting", "% of a step", lines)] if lines else []
    startup = plain_line("start-up", [(point.ranks, point.startup_s) for point in result.points])
    charts += [_ranks_chart("Start-up", "s", [startup])] if startup.points else []
    has_steps = any(point.steps_s is not None for point in result.points)
    columns = [
        TableColumn("ranks"),
        TableColumn("per step"),
        *([TableColumn(count(result.steps, "step"))] if has_steps else []),
    ]
    columns += [TableColumn("waits for gradients"), TableColumn("start-up"), TableColumn("per run")]
    columns += [TableColumn("bottleneck", is_number=False)]
    rows = [
        [
            cells.count_cell(point.ranks),
            cells.seconds_cell(point.step_s),
            *([cells.seconds_cell(point.steps_s)] if has_steps else []),
            cells.seconds_cell(point.exposed_s),
            cells.seconds_cell(point.startup_s),
            cells.seconds_cell(point.wall_s),
            cells.sentence_cell(point.bottleneck),
        ]
        for point in result.points
        if point.step_s is not None
    ]
    if not rows:
        return None
    return PageSection(
        "waiting",
        "Waiting per step",
        [*([ChartRow(charts)] if charts else []), Table("", columns, rows, MAX_OPEN_ROWS, "more ranks")],
    )


def _accuracy_section(result: ScaleResult) -> PageSection | None:
    if not _has_accuracy(result):
        return None
    line = _points_line("top-1", result.points, lambda point: scale_interval(point.top1, 100))
    note = "Accuracy of whole runs of the recipe, which shows the cost of larger batches."
    rule = (100 * result.target, "target") if result.target is not None else None
    chart = _ranks_chart("Accuracy", "% top-1", [line], low=None, rule=rule)
    return PageSection("accuracy", "Accuracy over ranks", [ChartRow([chart]), Paragraph(note)])


def _points_line(name: str, points: Sequence[ScalePoint], read: Callable[[ScalePoint], Interval | None]) -> ChartLine:
    return measured_line(name, [(point.ranks, read(point)) for point in points])


def _ideal_lines(points: Sequence[ScalePoint]) -> list[ChartLine]:
    first = points[0]
    assert first.images_per_s is not None, first
    each = first.images_per_s.value / first.ranks
    return [ChartLine("ideal", [(point.ranks, each * point.ranks) for point in points])] if len(points) > 1 else []


def _ranks_chart(
    title: str,
    unit: str,
    lines: Sequence[ChartLine],
    low: float | None = 0.0,
    rule: tuple[float, str] | None = None,
    *,
    log_y: bool = False,
) -> Chart:
    return Chart(title, "ranks", unit, lines, low=low, rule=rule, log_x=True, log_y=log_y)


def _efficiency_percent(point: ScalePoint) -> Interval | None:
    return scale_interval(point.efficiency, 100)


def _to_percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _has_accuracy(result: ScaleResult) -> bool:
    return any(point.top1 is not None for point in result.points)


def _has_epoch(result: ScaleResult) -> bool:
    return any(point.epoch_s is not None for point in result.points)


def _ranks_name(point: ScalePoint) -> str:
    ranks = count(point.ranks, "rank")
    return ranks if point.nodes <= 1 else f"{ranks} on {count(point.nodes, 'node')}"


def _interval_text(interval: Interval) -> str:
    if interval.low is None or interval.high is None:
        return "measured once"
    return f"{cells.format_rate(interval.low)} to {cells.format_rate(interval.high)} {CONFIDENCE_TEXT}"


def _interval_suffix(interval: Interval, format_bound: Callable[[float], str]) -> str:
    return (
        ""
        if interval.low is None or interval.high is None
        else f", {format_bound(interval.low)} to {format_bound(interval.high)} {CONFIDENCE_TEXT}"
    )


def _ranks_row(result: ScaleResult, point: ScalePoint) -> list[TableCell]:
    efficiency, speedup = cells.share_cell(point.efficiency), cells.ratio_cell(point.speedup)
    if point is result.base:  # exact by definition
        efficiency, speedup = TableCell("100 %"), TableCell(f"{point.ranks:.2f}x")
    return [
        cells.count_cell(point.ranks),
        cells.count_cell(point.nodes),
        cells.count_cell(point.batch_size),
        cells.count_cell(point.rank_batch),
        cells.rate_cell(point.images_per_s),
        *([cells.seconds_cell(point.epoch_s)] if _has_epoch(result) else []),
        speedup,
        efficiency,
        cells.share_cell(point.exposed_share),
        cells.share_cell(point.straggler_share),
        *([cells.accuracy_cell(point.top1), cells.points_cell(point.top1_gap)] if _has_accuracy(result) else []),
        cells.sentence_cell(point.error or result.note(point) or point.bottleneck),
    ]


def batch_table(result: ScaleResult) -> Table:
    """Return a row per batch size, warm-up and LR rule."""
    has_target = result.target is not None
    notes = [point.error or result.note(point) for point in result.batches]
    columns = [TableColumn("batch"), TableColumn("warm-up", is_number=False), TableColumn("LR rule", is_number=False)]
    columns += [TableColumn("peak LR"), TableColumn("top-1")]
    columns += (
        [TableColumn("reached"), TableColumn("time to target"), TableColumn("epochs to target")] if has_target else []
    )
    has_epoch = any(point.epoch_s is not None for point in result.batches)
    columns += [
        TableColumn("images/s"),
        *([TableColumn("per epoch")] if has_epoch else []),
        *([TableColumn("note", is_number=False, is_wide=True)] if any(notes) else []),
    ]
    rows = [
        [
            *_batch_row(point, has_target=has_target),
            *([cells.seconds_cell(point.epoch_s)] if has_epoch else []),
            *([cells.sentence_cell(note)] if any(notes) else []),
        ]
        for point, note in zip(result.batches, notes, strict=True)
    ]
    return Table("Batches", columns, rows, MAX_OPEN_ROWS, "more batches")


def build_batch_page(report: ExperimentReport, result: ScaleResult) -> ReportPage:
    """Return the report of a batch-size study."""
    runs = [(_batch_name(point), point.runs) for point in result.batches]
    facts = [("total time of runs", cells.seconds_cell(result.wall_s))]
    if result.target is not None:
        facts.insert(0, ("target, top-1", cells.accuracy_cell(result.target)))
    subtitle = ["batch sizes", f"recipe {result.recipe} {result.recipe_hash}"]
    sections = [
        _batches_section(result),
        _curves_section(report, result),
        report.build_provenance(result.command, facts, result.provenance, runs),
    ]
    return report.build_page("Study of batch sizes", _batch_status(result), subtitle, _batch_figures(result), sections)


def build_curves_command(folder: Path, target: float | None) -> str:
    """Return the shell command that draws the learning curves of a study's runs."""
    level = "" if target is None else f" --target {target:g}"
    return f"paceline compare {shlex.quote(str(folder))}/trials/*{level} --out {shlex.quote(str(folder))}/curves.html"


def _curves_section(report: ExperimentReport, result: ScaleResult) -> PageSection | None:
    if not any(point.runs for point in result.batches):
        return None
    why = "To draw accuracy, loss and generalization gap of all runs over time and epochs:"
    return PageSection(
        "curves",
        "Learning curves",
        [Paragraph(why), Command(clean_text(build_curves_command(report.path, result.target), 4000))],
    )


def _batch_status(result: ScaleResult) -> tuple[str, Tone]:
    failed = sum(bool(point.error) for point in result.batches)
    if failed:
        return f"{failed} of {len(result.batches)} points failed", "bad" if failed == len(result.batches) else "warning"
    if result.caution:
        return "measured, with a caution", "warning"
    return f"{count(len(result.batches), 'point')} measured", "good"


def _batch_name(point: BatchPoint) -> str:
    parts = (
        f"batch {point.batch_size:,}",
        point.warmup and f"warm-up {point.warmup}",
        _RULE_LABELS.get(point.lr_rule, ""),
    )
    return clean_text(", ".join(filter(None, parts)))


def _batch_figures(result: ScaleResult) -> list[KeyFigure]:
    figures = []
    reached = [point for point in result.batches if point.to_target_s is not None]
    if reached:
        best = min(reached, key=lambda point: point.to_target_s.value if point.to_target_s else 0.0)
        assert best.to_target_s is not None, best
        target = f"to {accuracy(result.target)}" if result.target is not None else "to the target"
        figures.append(
            KeyFigure(
                f"soonest {target}",
                cells.seconds_cell(best.to_target_s.value),
                f"{_batch_name(best)}, peak {number(best.lr)}",
            )
        )
    evaluated = [point for point in result.batches if point.top1 is not None]
    if evaluated:
        most = max(evaluated, key=lambda point: point.top1.value if point.top1 else 0.0)
        assert most.top1 is not None, most
        figures.append(KeyFigure("highest top-1", cells.accuracy_cell(most.top1.value), _batch_name(most)))
    if result.target is not None:
        total = sum(point.seeds for point in result.batches)
        figures.append(
            KeyFigure("runs that reached it", TableCell(f"{sum(p.reached for p in result.batches)} of {total}"))
        )
    return figures


def _batches_section(result: ScaleResult) -> PageSection:
    quantities: list[tuple[str, str, Callable[[BatchPoint], Interval | None], float | None]] = [
        ("Time to the target", "s", lambda point: point.to_target_s, 0.0),
        ("Epochs to the target", "epochs", lambda point: point.to_target_epochs, 0.0),
        ("Accuracy", "% top-1", lambda point: scale_interval(point.top1, 100), None),
        ("Speed", "images/s", lambda point: point.images_per_s, 0.0),
    ]
    charts = []
    for title, unit, read, low in quantities:
        lines = [line for line in _policy_lines(result.batches, read) if line.points]
        if lines:
            rule = (100 * result.target, "target") if title == "Accuracy" and result.target is not None else None
            charts.append(Chart(title, "batch", unit, lines, low=low, rule=rule, log_x=True))
    blocks: list[Block] = [ChartRow(charts)] if charts else [cells.missing_paragraph("No run has finished.")]
    which = "" if result.target is None else ", times and epochs to the target of the runs that reached it"
    note = f"Means over seeds{which}; bars show intervals for several seeds."
    findings = [Paragraph(f"Caution: {clean_text(result.caution, 1000)}")] if result.caution else []
    findings += [Paragraph(clean_text(sentence, 500)) for sentence in result.sentences]
    return PageSection("batches", "Batch sizes", [*findings, *blocks, Paragraph(note), batch_table(result)])


def _policy_lines(batches: Sequence[BatchPoint], read: Callable[[BatchPoint], Interval | None]) -> Iterable[ChartLine]:
    ways = dict.fromkeys((point.warmup, point.lr_rule) for point in batches)
    warmups = {warmup for warmup, rule in ways if rule != _ANY_RULE}
    for warmup, rule in ways:
        # All rules agree at the batch size that the LR is for, so its point belongs to every line.
        if rule == _ANY_RULE and warmup in warmups:
            continue
        values = [
            (point.batch_size, read(point))
            for point in batches
            if point.warmup == warmup and point.lr_rule in (rule, _ANY_RULE)
        ]
        parts = (rule if rule != _ANY_RULE else "", warmup)
        yield measured_line(clean_text(", ".join(filter(None, parts))), values, clean_text(rule))


def _batch_row(point: BatchPoint, *, has_target: bool) -> list[TableCell]:
    reaching = [
        TableCell(f"{point.reached} of {point.seeds}", point.reached),
        cells.seconds_cell(point.to_target_s),
        cells.number_cell(point.to_target_epochs),
    ]
    return [
        cells.count_cell(point.batch_size),
        cells.sentence_cell(point.warmup),
        cells.sentence_cell(point.lr_rule),
        TableCell(number(point.lr), point.lr),
        cells.accuracy_cell(point.top1),
        *(reaching if has_target else []),
        cells.rate_cell(point.images_per_s),
    ]
