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
    Cell,
    Chart,
    Charts,
    Column,
    Command,
    Figure,
    Line,
    Page,
    Paragraph,
    Section,
    Table,
    Tone,
)
from paceline.report.experiments.curves import measured, times
from paceline.report.experiments.frame import MANY, Told
from paceline.report.sections import cells, intervals
from paceline.report.words import clean

_ANY: Final = "any"
_RULES: Final = {"none": "LR as it is", "sqrt": "LR by the root", "linear": "linear LR"}


def summary(result: ScaleResult) -> Table:
    """Return a row per batch size, warm-up and LR rule."""
    has_target = result.target is not None
    notes = [point.error or result.note(point) for point in result.batches]
    columns = [Column("batch"), Column("warm-up", is_number=False), Column("LR rule", is_number=False)]
    columns += [Column("peak LR"), Column("top-1")]
    columns += [Column("reached"), Column("time to target"), Column("epochs to target")] if has_target else []
    has_epoch = any(point.epoch_s is not None for point in result.batches)
    columns += [
        Column("images/s"),
        *([Column("per epoch")] if has_epoch else []),
        *([Column("note", is_number=False, is_wide=True)] if any(notes) else []),
    ]
    rows = [
        [
            *_batch(point, has_target=has_target),
            *([intervals.maybe_seconds(point.epoch_s)] if has_epoch else []),
            *([intervals.sentence(note)] if any(notes) else []),
        ]
        for point, note in zip(result.batches, notes, strict=True)
    ]
    return Table("Batches", columns, rows, MANY, "more batches")


def batches_page(report: Told, result: ScaleResult) -> Page:
    """Return the report of a batch-size study."""
    runs = [(_name(point), point.runs) for point in result.batches]
    facts = [("total time of runs", cells.of_seconds(result.wall_s))]
    if result.target is not None:
        facts.insert(0, ("target, top-1", cells.of_accuracy(result.target)))
    subtitle = ["batch sizes", f"recipe {result.recipe} {result.recipe_hash}"]
    sections = [
        _batches(result),
        _curves(report, result),
        report.origin(result.command, facts, result.provenance, runs),
    ]
    return report.page("Study of batch sizes", _status(result), subtitle, _figures(result), sections)


def curves_command(folder: Path, target: float | None) -> str:
    """Return the shell command that draws the learning curves of a study's runs together."""
    level = "" if target is None else f" --target {target:g}"
    return f"paceline compare {shlex.quote(str(folder))}/trials/*{level} --out {shlex.quote(str(folder))}/curves.html"


def _curves(report: Told, result: ScaleResult) -> Section | None:
    if not any(point.runs for point in result.batches):
        return None
    why = "To draw accuracy, loss and generalization gap of all runs over time and epochs:"
    return Section(
        "curves", "Learning curves", [Paragraph(why), Command(clean(curves_command(report.path, result.target), 4000))]
    )


def _status(result: ScaleResult) -> tuple[str, Tone]:
    failed = sum(bool(point.error) for point in result.batches)
    if failed:
        return f"{failed} of {len(result.batches)} points failed", "bad" if failed == len(result.batches) else "warning"
    if result.caution:
        return "measured, with a caution", "warning"
    return f"{count(len(result.batches), 'point')} measured", "good"


def _name(point: BatchPoint) -> str:
    parts = (f"batch {point.batch_size:,}", point.warmup and f"warm-up {point.warmup}", _RULES.get(point.lr_rule, ""))
    return clean(", ".join(filter(None, parts)))


def _figures(result: ScaleResult) -> list[Figure]:
    figures = []
    reached = [point for point in result.batches if point.to_target_s is not None]
    if reached:
        best = min(reached, key=lambda point: point.to_target_s.value if point.to_target_s else 0.0)
        assert best.to_target_s is not None, best
        target = f"to {accuracy(result.target)}" if result.target is not None else "to the target"
        figures.append(
            Figure(
                f"soonest {target}", cells.of_seconds(best.to_target_s.value), f"{_name(best)}, peak {number(best.lr)}"
            )
        )
    evaluated = [point for point in result.batches if point.top1 is not None]
    if evaluated:
        most = max(evaluated, key=lambda point: point.top1.value if point.top1 else 0.0)
        assert most.top1 is not None, most
        figures.append(Figure("highest top-1", cells.of_accuracy(most.top1.value), _name(most)))
    if result.target is not None:
        total = sum(point.seeds for point in result.batches)
        figures.append(Figure("runs that reached it", Cell(f"{sum(p.reached for p in result.batches)} of {total}")))
    return figures


def _batches(result: ScaleResult) -> Section:
    quantities: list[tuple[str, str, Callable[[BatchPoint], Interval | None], float | None]] = [
        ("Time to the target", "s", lambda point: point.to_target_s, 0.0),
        ("Epochs to the target", "epochs", lambda point: point.to_target_epochs, 0.0),
        ("Accuracy", "% top-1", lambda point: times(point.top1, 100), None),
        ("Speed", "images/s", lambda point: point.images_per_s, 0.0),
    ]
    charts = []
    for title, unit, read, low in quantities:
        lines = [line for line in _ways(result.batches, read) if line.points]
        if lines:
            rule = (100 * result.target, "target") if title == "Accuracy" and result.target is not None else None
            charts.append(Chart(title, "batch", unit, lines, low=low, rule=rule, log_x=True))
    blocks: list[Block] = [Charts(charts)] if charts else [cells.missing("No run has finished.")]
    which = "" if result.target is None else ", times and epochs to the target of the runs that reached it"
    note = f"Means over seeds{which}; bars show intervals for several seeds."
    findings = [Paragraph(f"Caution: {clean(result.caution, 1000)}")] if result.caution else []
    findings += [Paragraph(clean(sentence, 500)) for sentence in result.sentences]
    return Section("batches", "Batch sizes", [*findings, *blocks, Paragraph(note), summary(result)])


def _ways(batches: Sequence[BatchPoint], read: Callable[[BatchPoint], Interval | None]) -> Iterable[Line]:
    ways = dict.fromkeys((point.warmup, point.lr_rule) for point in batches)
    warmups = {warmup for warmup, rule in ways if rule != _ANY}
    for warmup, rule in ways:
        # All rules agree at the batch size that the LR is for, so its point belongs to every line.
        if rule == _ANY and warmup in warmups:
            continue
        values = [
            (point.batch_size, read(point))
            for point in batches
            if point.warmup == warmup and point.lr_rule in (rule, _ANY)
        ]
        parts = (rule if rule != _ANY else "", warmup)
        yield measured(clean(", ".join(filter(None, parts))), values, clean(rule))


def _batch(point: BatchPoint, *, has_target: bool) -> list[Cell]:
    reaching = [
        Cell(f"{point.reached} of {point.seeds}", point.reached),
        intervals.of_seconds(point.to_target_s),
        intervals.of_number(point.to_target_epochs),
    ]
    return [
        cells.count(point.batch_size),
        intervals.sentence(point.warmup),
        intervals.sentence(point.lr_rule),
        Cell(number(point.lr), point.lr),
        intervals.of_accuracy(point.top1),
        *(reaching if has_target else []),
        intervals.of_rate(point.images_per_s),
    ]
