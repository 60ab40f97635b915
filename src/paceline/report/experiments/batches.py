"""Build the page of a batch-size study: time and epochs to a target over batch sizes, warm-ups and LR rules."""

import shlex
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

from paceline.core.experiments.scaling import BatchPoint, ScaleResult
from paceline.core.interval import Interval
from paceline.core.units import accuracy, count, number
from paceline.report.blocks import (
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
from paceline.report.experiments.curves import measured_line, scale_interval
from paceline.report.experiments.frame import MAX_OPEN_ROWS, ExperimentReport
from paceline.report.sections import cells, intervals
from paceline.report.words import clean_text

_ANY_RULE: Final = "any"
_RULE_LABELS: Final = {"none": "LR as it is", "sqrt": "LR by the root", "linear": "linear LR"}


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
            *([intervals.optional_seconds_cell(point.epoch_s)] if has_epoch else []),
            *([intervals.sentence_cell(note)] if any(notes) else []),
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
    """Return the shell command that draws the learning curves of a study's runs together."""
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
        intervals.seconds_interval_cell(point.to_target_s),
        intervals.number_interval_cell(point.to_target_epochs),
    ]
    return [
        cells.count_cell(point.batch_size),
        intervals.sentence_cell(point.warmup),
        intervals.sentence_cell(point.lr_rule),
        TableCell(number(point.lr), point.lr),
        intervals.accuracy_interval_cell(point.top1),
        *(reaching if has_target else []),
        intervals.rate_interval_cell(point.images_per_s),
    ]
