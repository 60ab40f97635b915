"""Build the page of a scaling prediction."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from paceline.core.experiments.results import MeasuredPoint, Predicted, PredictionResult
from paceline.core.stages import display_name
from paceline.core.units import count, number, seconds, share
from paceline.report import cells
from paceline.report.document import (
    BarChart,
    BarRow,
    BarSegment,
    Block,
    Chart,
    ChartLine,
    ChartRow,
    Command,
    KeyFigure,
    KeyValueList,
    PageSection,
    Paragraph,
    ReportPage,
    Table,
    TableCell,
    TableColumn,
)
from paceline.report.experiment_common import CONFIDENCE_TEXT, MAX_OPEN_ROWS, ExperimentReport, plain_line
from paceline.report.series import Point
from paceline.report.text import clean_text, finite_or_none

_NUM_COLOURS: Final = 6
_START_UP: Final = "start_up"
_BASIS_VERBS: Final = {"points": "Fitted to", "run": "Computed from"}
_INTERVAL_LABELS: Final = {"points": CONFIDENCE_TEXT, "run": "is likely"}
_BASIS_LABELS: Final = {"points": "from a table of times", "run": "from a run and a network"}


def prediction_table(result: PredictionResult) -> Table:
    """Return a row per number of ranks, measured or predicted."""
    has_cost = any(each.cost is not None for each in result.predictions)
    has_start_up = any(each.parts.get(_START_UP) for each in result.predictions)
    titles = ["nodes", "batch per rank", *(["images"] if result.has_several_images else [])]
    titles += ["time", "speed-up", "efficiency", "per step", "images/s"]
    titles += [*(["start-up"] if has_start_up else []), "GPU-hours", *(["cost"] if has_cost else [])]
    columns = [TableColumn("ranks"), *map(TableColumn, titles), TableColumn("dominates", is_number=False)]
    rows = [_measured_row(result, point, has_start_up=has_start_up, has_cost=has_cost) for point in result.points]
    rows += [_predicted_row(result, each, has_start_up=has_start_up, has_cost=has_cost) for each in result.predictions]
    return Table(
        "Measured and predicted" if result.points else "Predictions", columns, rows, MAX_OPEN_ROWS, "more ranks"
    )


def build_prediction_page(report: ExperimentReport, result: PredictionResult) -> ReportPage:
    """Return the report of a prediction."""
    subtitle = [_BASIS_LABELS[result.basis], result.source, result.network]
    sections = [
        _time_section(result),
        _parts_section(result),
        _basis_section(result),
        report.build_provenance(result.command, (), result.provenance),
    ]
    status = f"{count(len(result.predictions), 'number')} of ranks predicted"
    return report.build_page("Prediction", (status, "good"), subtitle, _prediction_figures(result), sections)


def _prediction_figures(result: PredictionResult) -> list[KeyFigure]:
    if not result.predictions:
        return []
    most = max(result.predictions, key=lambda each: each.ranks)
    time_note = "; ".join(
        filter(None, (f"{_interval_text(most)} {_INTERVAL_LABELS[result.basis]}", _dominating_part(most)))
    )
    return [
        KeyFigure(f"time on {count(most.ranks, 'rank')}", cells.seconds_cell(most.time_s), time_note),
        KeyFigure("efficiency", cells.share_cell(most.efficiency), f"on {count(most.ranks, 'rank')}"),
        KeyFigure(
            "images/s",
            TableCell(cells.format_rate(most.images_per_s), most.images_per_s),
            f"on {count(most.ranks, 'rank')}",
        ),
        KeyFigure(
            "GPU-hours",
            cells.number_cell(most.gpu_hours),
            "" if most.cost is None else f"cost {_format_cost(most.cost)}",
        ),
    ]


def _interval_text(each: Predicted) -> str:
    # Too few points give no upper bound.
    if finite_or_none(each.high_s) is None:
        return f"{seconds(each.low_s)} or more"
    return f"{seconds(each.low_s)} to {seconds(each.high_s)}"


def _dominating_part(each: Predicted) -> str:
    return (
        f"the largest part besides computation is {clean_text(display_name(each.dominates))}" if each.dominates else ""
    )


def _time_section(result: PredictionResult) -> PageSection:
    fitted_s = [(point.ranks, result.time_of(point) * point.fitted_s / point.time_s) for point in result.points]
    measured_s = [(point.ranks, _positive_or_none(result.time_of(point))) for point in result.points]
    charts = [
        *([_throughput_chart(result)] if result.is_of_speeds else []),
        _ranks_chart(
            "Time",
            "s",
            [
                _predicted_line(result, lambda each, time_s: time_s),
                plain_line("measured", measured_s),
                plain_line("fitted", [(ranks, _positive_or_none(time_s)) for ranks, time_s in fitted_s], marked=False),
            ],
            log_y=True,
        ),
        _ranks_chart(
            "Speed-up",
            "over one rank",
            [
                _predicted_line(result, lambda each, time_s: _single_rank_s(each) / time_s),
                plain_line("measured", [(point.ranks, _positive_or_none(point.speedup)) for point in result.points]),
                plain_line("ideal", [(ranks, ranks) for ranks in _all_ranks(result)], marked=False),
            ],
            log_y=True,
        ),
        _ranks_chart(
            "Efficiency",
            "% of the speed per rank",
            [
                _predicted_line(result, lambda each, time_s: 100 * _single_rank_s(each) / time_s / each.ranks),
                plain_line("measured", [(point.ranks, _to_percent(point.efficiency)) for point in result.points]),
                plain_line(
                    "fitted",
                    [(point.ranks, _to_percent(point.fitted_efficiency)) for point in result.points],
                    marked=False,
                ),
            ],
            rule=(100.0, "ideal"),
        ),
    ]
    charts = [chart for chart in charts if any(line.points for line in chart.lines if line.name != "ideal")]
    blocks: list[Block] = [ChartRow(charts)] if charts else [cells.missing_paragraph("Nothing was predicted.")]
    if result.has_several_images:
        blocks.append(Paragraph("Times are for different numbers of images, so they do not lie on one curve."))
    if any(point.efficiency is not None for point in result.points):
        blocks.append(Paragraph(describe_efficiency(result)))
    return PageSection("time", "Time over ranks", [*blocks, prediction_table(result)])


def _throughput_chart(result: PredictionResult) -> Chart:
    base = min(result.points, key=lambda point: point.ranks)
    lines = [
        _predicted_line(result, lambda each, time_s: each.images / time_s),
        plain_line("measured", [(point.ranks, point.images / point.time_s) for point in result.points]),
        plain_line(
            "ideal",
            [(ranks, ranks / base.ranks * base.images / base.time_s) for ranks in _all_ranks(result)],
            marked=False,
        ),
    ]
    return _ranks_chart("Throughput", "images/s", lines, log_y=True)


def describe_efficiency(result: PredictionResult) -> str:
    """Return a sentence that defines speed-up and efficiency of a prediction from points."""
    fewest = count(min(point.ranks for point in result.points), "rank")
    what = "" if result.is_of_speeds else " of whole runs with their start-up"
    return (
        f"Speed-up is ranks times efficiency. Efficiency is images/s per rank{what}. Measured efficiency is relative "
        f"to {fewest} as measured, predicted efficiency to the fitted time of 1 rank."
    )


def _ranks_chart(
    title: str, unit: str, lines: Sequence[ChartLine], rule: tuple[float, str] | None = None, *, log_y: bool = False
) -> Chart:
    lines = [line for line in lines if line.points]
    return Chart(title, "ranks", unit, lines, low=None if log_y else 0.0, rule=rule, log_x=True, log_y=log_y)


def _predicted_line(result: PredictionResult, read: Callable[[Predicted, float], float]) -> ChartLine:
    """Return `read(prediction, time)` over ranks, with intervals whose bounds are known."""
    points: list[tuple[float, float | None]] = []
    bounds: dict[Point, tuple[float, float]] = {}
    for each in result.predictions:
        if not each.time_s > 0:
            continue
        value = read(each, each.time_s)
        points.append((each.ranks, value))
        if finite_or_none(each.low_s) and finite_or_none(each.high_s):
            ends = sorted((read(each, each.low_s), read(each, each.high_s)))
            bounds[each.ranks, value] = (ends[0], ends[1])
    return replace(plain_line("predicted", points), bounds=bounds)


def _single_rank_s(each: Predicted) -> float:
    # Efficiency is t_1 / (n t_n), so this is t_1.
    return each.efficiency * each.ranks * each.time_s


def _all_ranks(result: PredictionResult) -> list[int]:
    return sorted({point.ranks for point in result.points} | {each.ranks for each in result.predictions})


def _positive_or_none(value: float | None) -> float | None:
    # A log axis has no place for 0.
    return value if value is not None and value > 0 else None


def _to_percent(value: float | None) -> float | None:
    return None if value is None else 100 * value


def _parts_section(result: PredictionResult) -> PageSection | None:
    names = list(dict.fromkeys(name for each in result.predictions for name in each.parts))
    if not names:
        return None
    colours = {name: f"c-part-{index % _NUM_COLOURS}" for index, name in enumerate(names)}
    rows = []
    for each in result.predictions:
        whole = sum(value for value in each.parts.values() if value > 0) or 1.0
        segments = [
            BarSegment(
                clean_text(display_name(name)),
                value / whole,
                f"{seconds(value)}, {share(value / whole)}",
                colours[name],
            )
            for name, value in each.parts.items()
            if value > 0
        ]
        rows.append(BarRow(count(each.ranks, "rank"), segments, seconds(each.time_s)))
    legend = [(clean_text(display_name(name)), colours[name]) for name in names]
    titles = ["ranks", *map(display_name, names)]
    table = [
        [cells.count_cell(each.ranks), *(cells.seconds_cell(each.parts.get(name)) for name in names)]
        for each in result.predictions
    ]
    bars = BarChart("Parts of the predicted time", rows, legend, "shares of each prediction")
    parts = Table("", [TableColumn(clean_text(each)) for each in titles], table, MAX_OPEN_ROWS, "more ranks")
    return PageSection("parts", "Dominant parts", [bars, parts])


def _basis_section(result: PredictionResult) -> PageSection:
    blocks: list[Block] = [Paragraph(f"{_BASIS_VERBS[result.basis]} {clean_text(result.source, 300)}:")]
    blocks += [Paragraph(f"Collective times follow {clean_text(result.network, 300)}.")] if result.network else []
    blocks += [Command(clean_text(result.form, 2000))]
    terms = [(clean_text(name), TableCell(seconds(value), value)) for name, value in result.terms.items()]
    blocks += [KeyValueList(terms, "Terms")] if terms else []
    titles = ("ranks", "nodes", "batch per rank", "images", "measured", "fitted", "difference")
    rows = [
        [
            cells.count_cell(point.ranks),
            cells.count_cell(point.nodes),
            cells.count_cell(point.rank_batch),
            cells.count_cell(point.images),
            cells.seconds_cell(point.time_s),
            cells.seconds_cell(point.fitted_s),
            _difference_cell(point.fitted_s, point.time_s),
        ]
        for point in result.points
    ]
    blocks += (
        [Table("Measurements", [TableColumn(each) for each in titles], rows, MAX_OPEN_ROWS, "more points")]
        if rows
        else []
    )
    blocks += [Paragraph(clean_text(note, 1000)) for note in result.notes]
    return PageSection("basis", "Basis", blocks)


def _difference_cell(fitted_s: float, time_s: float) -> TableCell:
    if not time_s > 0:
        return TableCell("")
    change = fitted_s / time_s - 1
    return TableCell(f"{100 * change:+.1f} %", change)


def _format_cost(cost: float) -> str:
    return f"{cost:,.2f}"


def _measured_row(
    result: PredictionResult, point: MeasuredPoint, *, has_start_up: bool, has_cost: bool
) -> list[TableCell]:
    # Only points that are speeds have a step time.
    time_s, hours = result.time_of(point), point.ranks * result.time_of(point) / 3600
    pace = [cells.EMPTY_CELL, cells.EMPTY_CELL]
    if result.is_of_speeds:
        rate = point.images / point.time_s
        pace = [cells.seconds_cell(point.ranks * point.rank_batch / rate), TableCell(cells.format_rate(rate), rate)]
    return [
        cells.count_cell(point.ranks),
        cells.count_cell(point.nodes),
        cells.count_cell(point.rank_batch),
        *([cells.count_cell(point.images)] if result.has_several_images else []),
        TableCell(seconds(time_s), time_s, note="measured"),
        *_speedup_cells(point),
        *pace,
        *([_run_share_cell(result.start_up_s, time_s)] if has_start_up else []),
        TableCell(number(hours), hours),
        *([cells.EMPTY_CELL] if has_cost else []),
        cells.EMPTY_CELL,
    ]


def _speedup_cells(each: MeasuredPoint | Predicted) -> list[TableCell]:
    speedup = cells.EMPTY_CELL if each.speedup is None else TableCell(f"{each.speedup:,.2f}x", each.speedup)
    return [speedup, cells.share_cell(each.efficiency)]


def _run_share_cell(part_s: float | None, time_s: float) -> TableCell:
    return cells.EMPTY_CELL if part_s is None or not time_s > 0 else cells.share_cell(part_s / time_s)


def _predicted_row(result: PredictionResult, each: Predicted, *, has_start_up: bool, has_cost: bool) -> list[TableCell]:
    return [
        cells.count_cell(each.ranks),
        cells.count_cell(each.nodes),
        cells.count_cell(each.rank_batch),
        *([cells.count_cell(each.images)] if result.has_several_images else []),
        TableCell(seconds(each.time_s), each.time_s, note=_interval_text(each)),
        *_speedup_cells(each),
        cells.seconds_cell(each.step_s),
        TableCell(cells.format_rate(each.images_per_s), each.images_per_s),
        *([_run_share_cell(each.parts.get(_START_UP), each.time_s)] if has_start_up else []),
        TableCell(number(each.gpu_hours), each.gpu_hours),
        *([TableCell("" if each.cost is None else _format_cost(each.cost), each.cost)] if has_cost else []),
        cells.sentence_cell(display_name(each.dominates)),
    ]
