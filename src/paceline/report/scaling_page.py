"""Build the pages of weak and strong scaling and of batch-size studies."""

import shlex
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from paceline.core.experiments.experiment_dir import ExperimentDir
from paceline.core.experiments.results import BatchPoint, ScalePoint, ScaleResult
from paceline.core.statistics import Interval
from paceline.core.units import accuracy, count, number
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
    TableCell,
)
from paceline.report.experiment_common import (
    CONFIDENCE_TEXT,
    SPREAD_COLUMNS,
    Column,
    ExperimentReport,
    ResultRows,
    build_record,
    caution_paragraphs,
    chart_line,
    chart_row,
    measurement_facts,
    measurement_status,
    ranks_chart,
    shell_command,
    to_percent,
)
from paceline.report.text import clean_text, finite_or_none

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
_RANK_COLUMNS: Final = (
    Column("ranks", "ranks", cells.count_cell),
    Column("nodes", "nodes", cells.count_cell),
    Column("batch_size", "batch", cells.count_cell),
    Column("rank_batch", "batch per rank", cells.count_cell),
    Column("images_per_s", "images/s", cells.rate_cell, has_interval=True),
    *SPREAD_COLUMNS,
    Column("step_s", "per step", cells.seconds_cell),
    Column("epoch_s", "per epoch", cells.seconds_cell),
    Column("steps_s", "measured steps", cells.seconds_cell),
    Column("efficiency", has_interval=True),
    Column("speedup", has_interval=True),
    Column("exposed_s", "waits for gradients", cells.seconds_cell),
    Column("exposed_share", "exposed", cells.share_cell),
    Column("straggler_share", "stragglers", cells.share_cell),
    Column("startup_s", "start-up", cells.seconds_cell),
    Column("wall_s", "per run", cells.seconds_cell),
    Column("top1", "top-1", cells.accuracy_cell, has_interval=True),
    Column("top1_gap", "against the fewest ranks", cells.points_cell, has_interval=True),
    Column("bottleneck", "bottleneck"),
    Column("error"),
    # That of the fewest ranks is exact by definition, and no measurement.
    Column("shown_speedup", "speed-up", cells.ratio_cell, in_csv=False),
    Column("shown_efficiency", "efficiency", cells.share_cell, in_csv=False),
    Column("note", "note", is_wide=True, in_csv=False),
)
_OUTCOMES: Final = (
    "images_per_s epoch_s shown_speedup shown_efficiency exposed_share straggler_share top1 top1_gap note"
)
_BATCH_COLUMNS: Final = (
    Column("batch_size", "batch", cells.count_cell),
    Column("warmup", "warm-up"),
    Column("lr_rule", "LR rule"),
    Column("lr", "peak LR", cells.number_cell),
    Column("seeds"),
    Column("reached"),
    Column("top1", "top-1", cells.accuracy_cell, has_interval=True),
    Column("images_per_s", "images/s", cells.rate_cell, has_interval=True),
    Column("epoch_s", "per epoch", cells.seconds_cell),
    Column("to_target_s", "time to target", cells.seconds_cell, has_interval=True),
    Column("to_target_epochs", "epochs to target", cells.number_cell, has_interval=True),
    Column("error"),
    Column("shown_reached", "reached", in_csv=False),
    Column("note", "note", is_wide=True, in_csv=False),
)


def scaling_rows(result: ScaleResult) -> ResultRows:
    """Return a row per number of ranks."""
    records = []
    for point in result.points:
        shown: tuple[Interval | None, Interval | None] = (point.speedup, point.efficiency)
        if point is result.base:
            shown = (Interval(value=point.ranks), Interval(value=1.0))
        note = point.error or result.note(point) or point.bottleneck
        records.append(build_record(point, shown_speedup=shown[0], shown_efficiency=shown[1], note=note))
    return ResultRows(
        _RANK_COLUMNS,
        records,
        "Ranks",
        f"ranks nodes batch_size rank_batch {_OUTCOMES}",
        "more ranks",
    )


def batch_rows(result: ScaleResult) -> ResultRows:
    """Return a row per batch size, warm-up and LR rule."""
    records = [
        build_record(
            point,
            shown_reached=f"{point.reached} of {point.seeds}" if result.target is not None else "",
            note=point.error or result.note(point),
        )
        for point in result.batches
    ]
    main = "batch_size warmup lr_rule lr top1 shown_reached to_target_s to_target_epochs images_per_s epoch_s note"
    return ResultRows(_BATCH_COLUMNS, records, "Batches", main, "more batches", num_names=3)


def build_scaling_page(report: ExperimentReport, result: ScaleResult) -> ReportPage:
    """Return the report of weak or strong scaling."""
    rows, caution = scaling_rows(result), caution_paragraphs(result.caution)
    runs = [(_ranks_name(point), point.runs) for point in result.points]
    predict = _prediction_section(report, result)
    nodes = "nodes" if any(point.nodes > 1 for point in result.points) else ""
    sections = [
        _speed_section(result, rows, caution),
        _waiting_section(result, rows),
        _accuracy_section(result),
        predict,
        report.build_provenance(result.command, measurement_facts(result), result.provenance, runs),
    ]
    return report.build_page(
        "Scaling report",
        measurement_status(result.points, "point", result.caution),
        [f"{result.mode} scaling", f"recipe {result.recipe} {result.recipe_hash}"],
        _scaling_figures(result),
        sections,
        summary=[
            *caution,
            rows.table(f"ranks {nodes} batch_size {_OUTCOMES}", title="Ranks"),
            *(predict.blocks if predict else []),
        ],
    )


def _scaling_figures(result: ScaleResult) -> list[KeyFigure]:
    measured_points = [point for point in result.points if point.images_per_s is not None]
    if not measured_points:
        return []
    first, last = measured_points[0], measured_points[-1]
    rate = cells.rate_cell(last.images_per_s)
    name, of_step = _ranks_name(last), f"share of a step, {_ranks_name(last)}"
    bounds = f"{rate.note} {CONFIDENCE_TEXT}" if rate.note else "measured once"
    figures = [KeyFigure(f"images/s, {name}", TableCell(rate.text, rate.value), bounds)]
    if last.efficiency is not None:
        cell = cells.share_cell(last.efficiency)
        bounds = f", {cell.note} {CONFIDENCE_TEXT}" if cell.note else ""
        figures.append(KeyFigure("efficiency", TableCell(cell.text, cell.value), f"over {_ranks_name(first)}{bounds}"))
    if last.exposed_share is not None:
        figures.append(KeyFigure("waits for gradients", cells.share_cell(last.exposed_share), of_step))
    if last.straggler_share is not None:
        figures.append(KeyFigure("waits for stragglers", cells.share_cell(last.straggler_share), of_step))
    return figures


def _speed_section(result: ScaleResult, rows: ResultRows, caution: Sequence[Block]) -> PageSection:
    rate = chart_line("measured", [(point.ranks, point.images_per_s) for point in result.points])
    efficiency = chart_line(
        "efficiency", [(record["ranks"], to_percent(record["shown_efficiency"])) for record in rows.records]
    )
    # That of the fewest ranks alone says nothing.
    has_efficiency = any(point.efficiency is not None for point in result.points)
    charts = [
        ranks_chart("Speed", "images/s", [rate, *_ideal_lines(result)], log_y=True),
        ranks_chart(
            "Efficiency", "% of the speed per rank", [efficiency] if has_efficiency else [], rule=(100.0, "ideal")
        ),
    ]
    blocks: list[Block] = [*caution, *chart_row(charts, "No number of ranks was measured.")]
    blocks += [Paragraph(f"{_MODE_NOTES[result.mode]} {_EFFICIENCY_NOTE}"), rows.main_table()]
    return PageSection("speed", "Speed over ranks", blocks)


def _waiting_section(result: ScaleResult, rows: ResultRows) -> PageSection | None:
    table = rows.table("ranks step_s steps_s exposed_s startup_s wall_s bottleneck", having=["step_s"])
    if not table.rows:
        return None
    lines = [
        chart_line("exposed", [(point.ranks, to_percent(point.exposed_share)) for point in result.points]),
        chart_line("stragglers", [(point.ranks, to_percent(point.straggler_share)) for point in result.points]),
    ]
    startup = chart_line("start-up", [(point.ranks, point.startup_s) for point in result.points])
    charts = [ranks_chart("Waiting", "% of a step", lines), ranks_chart("Start-up", "s", [startup])]
    return PageSection("waiting", "Waiting per step", [*chart_row(charts, ""), table])


def _accuracy_section(result: ScaleResult) -> PageSection | None:
    line = chart_line("top-1", [(point.ranks, to_percent(point.top1)) for point in result.points])
    if not line.points:
        return None
    note = "Accuracy of whole runs of the recipe, which shows the cost of larger batches."
    rule = (100 * result.target, "target") if result.target is not None else None
    chart = ranks_chart("Accuracy", "% top-1", [line], low=None, rule=rule)
    return PageSection("accuracy", "Accuracy over ranks", [ChartRow([chart]), Paragraph(note)])


def _prediction_section(report: ExperimentReport, result: ScaleResult) -> PageSection | None:
    """Return the command that predicts an epoch on four times as many ranks."""
    measured = [point for point in result.points if point.images_per_s is not None]
    if len(measured) < 2:
        return None
    most = max(measured, key=lambda point: point.ranks)
    at, on_node = 4 * most.ranks, max(point.ranks // point.nodes for point in measured)
    arguments = ["paceline", "predict-scaling", "--points", str(ExperimentDir(report.path).points), "--at", str(at)]
    arguments += ["--ranks-per-node", str(on_node)]
    # The global batch stays, so the batch per rank shrinks.
    arguments += ["--rank-batch", str(max(1, most.batch_size // at))] if result.mode == "strong" else []
    # The points are speeds: their images are those of one second.
    arguments += [] if result.epoch_images is None else ["--images", f"{result.epoch_images:.0f}"]
    return PageSection(
        "predict", "More ranks", [Paragraph("To predict training on more ranks:"), shell_command(arguments)]
    )


def _ideal_lines(result: ScaleResult) -> list[ChartLine]:
    measured = [(each.ranks, each.images_per_s.value) for each in result.points if each.images_per_s]
    measured = [(ranks, rate) for ranks, rate in measured if finite_or_none(rate)]
    if len(measured) < 2:
        return []
    fewest, rate = measured[0]
    return [ChartLine("ideal", [(ranks, rate / fewest * ranks) for ranks, _ in measured])]


def _ranks_name(point: ScalePoint) -> str:
    ranks = count(point.ranks, "rank")
    return ranks if point.nodes <= 1 else f"{ranks} on {count(point.nodes, 'node')}"


def build_batch_page(report: ExperimentReport, result: ScaleResult) -> ReportPage:
    """Return the report of a batch-size study."""
    facts = measurement_facts(result)
    if result.target is not None:
        facts.insert(0, ("target, top-1", cells.accuracy_cell(result.target)))
    rows, curves = batch_rows(result), _curves_section(report, result)
    runs = [(_batch_name(point), point.runs) for point in result.batches]
    findings = caution_paragraphs(result.caution)
    findings += [Paragraph(clean_text(sentence, 500)) for sentence in result.sentences]
    sections = [
        _batches_section(result, rows, findings),
        curves,
        report.build_provenance(result.command, facts, result.provenance, runs),
    ]
    return report.build_page(
        "Study of batch sizes",
        measurement_status(result.batches, "point", result.caution),
        ["batch sizes", f"recipe {result.recipe} {result.recipe_hash}"],
        _batch_figures(result),
        sections,
        summary=[*findings, rows.main_table(), *(curves.blocks if curves else [])],
    )


def _curves_section(report: ExperimentReport, result: ScaleResult) -> PageSection | None:
    if not any(point.runs for point in result.batches):
        return None
    why = "To draw accuracy, loss and generalization gap of all runs over time and epochs:"
    folder, level = shlex.quote(str(report.path)), "" if result.target is None else f" --target {result.target:g}"
    command = f"paceline compare {folder}/trials/*{level} --out {folder}/curves.html"
    return PageSection("curves", "Learning curves", [Paragraph(why), Command(clean_text(command, 4000))])


def _batch_name(point: BatchPoint) -> str:
    parts = (
        f"batch {point.batch_size:,}",
        point.warmup and f"warm-up {point.warmup}",
        _RULE_LABELS.get(point.lr_rule, ""),
    )
    return clean_text(", ".join(filter(None, parts)))


def _batch_figures(result: ScaleResult) -> list[KeyFigure]:
    figures = []
    reached = [(point.to_target_s.value, point) for point in result.batches if point.to_target_s is not None]
    if reached:
        soonest_s, point = min(reached, key=lambda pair: pair[0])
        target = f"to {accuracy(result.target)}" if result.target is not None else "to the target"
        note = f"{_batch_name(point)}, peak {number(point.lr)}"
        figures.append(KeyFigure(f"soonest {target}", cells.seconds_cell(soonest_s), note))
    evaluated = [(point.top1.value, point) for point in result.batches if point.top1 is not None]
    if evaluated:
        highest, point = max(evaluated, key=lambda pair: pair[0])
        figures.append(KeyFigure("highest top-1", cells.accuracy_cell(highest), _batch_name(point)))
    if result.target is not None:
        reached_runs, runs = (sum(getattr(each, name) for each in result.batches) for name in ("reached", "seeds"))
        figures.append(KeyFigure("runs that reached it", TableCell(f"{reached_runs} of {runs}")))
    return figures


def _batches_section(result: ScaleResult, rows: ResultRows, findings: Sequence[Block]) -> PageSection:
    quantities: list[tuple[str, str, Callable[[BatchPoint], cells.Quantity], float | None]] = [
        ("Time to the target", "s", lambda point: point.to_target_s, 0.0),
        ("Epochs to the target", "epochs", lambda point: point.to_target_epochs, 0.0),
        ("Accuracy", "% top-1", lambda point: to_percent(point.top1), None),
        ("Speed", "images/s", lambda point: point.images_per_s, 0.0),
    ]
    rules = {"Accuracy": (100 * result.target, "target")} if result.target is not None else {}
    charts = [
        Chart(title, "batch", unit, [*_policy_lines(result.batches, read)], low=low, rule=rules.get(title), log_x=True)
        for title, unit, read, low in quantities
    ]
    which = "" if result.target is None else ", times and epochs to the target of the runs that reached it"
    note = Paragraph(f"Means over seeds{which}; bars show intervals for several seeds.")
    return PageSection(
        "batches", "Batch sizes", [*findings, *chart_row(charts, "No run has finished."), note, rows.main_table()]
    )


def _policy_lines(batches: Sequence[BatchPoint], read: Callable[[BatchPoint], cells.Quantity]) -> Iterable[ChartLine]:
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
        yield chart_line(clean_text(", ".join(filter(None, parts))), values, clean_text(rule))
