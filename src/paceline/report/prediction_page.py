"""Build the page of a scaling prediction."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from paceline.core.experiments.results import MeasuredPoint, Predicted, PredictionResult
from paceline.core.stages import display_name
from paceline.core.statistics import Interval
from paceline.core.units import count, seconds, share
from paceline.report import cells
from paceline.report.document import (
    BarChart,
    BarRow,
    BarSegment,
    Block,
    Chart,
    ChartLine,
    Command,
    KeyFigure,
    KeyValueList,
    PageSection,
    Paragraph,
    ReportPage,
    TableCell,
)
from paceline.report.experiment_common import (
    CONFIDENCE_TEXT,
    Column,
    ExperimentReport,
    Record,
    ResultRows,
    build_record,
    chart_line,
    chart_row,
    ranks_chart,
    to_percent,
)
from paceline.report.text import clean_text, finite_or_none

_NUM_COLOURS: Final = 6
_START_UP: Final = "start_up"
_BASIS_VERBS: Final = {"points": "Fitted to", "run": "Computed from"}
_INTERVAL_LABELS: Final = {"points": CONFIDENCE_TEXT, "run": "is likely"}
# Share of intervals of published tables that held: benchmarks/results/prediction.json.
_INTERVAL_COVERAGE: Final = "88 %"
_BASIS_LABELS: Final = {"points": "from a table of times", "run": "from a run and a network"}


_COLUMNS: Final = (
    Column("basis"),
    Column("ranks", "ranks", cells.count_cell),
    Column("nodes", "nodes", cells.count_cell),
    Column("rank_batch", "batch per rank", cells.count_cell),
    Column("images", "images", cells.count_cell),
    Column("time_s", "measured", cells.seconds_cell),
    Column("fitted_s", "fitted", cells.seconds_cell),
    Column("speedup", "speed-up", cells.ratio_cell),
    Column("efficiency", "efficiency", cells.share_cell),
    Column("fitted_efficiency"),
    Column("low_s"),
    Column("high_s"),
    Column("step_s"),
    Column("images_per_s"),
    Column("gpu_hours"),
    Column("cost", "cost", lambda cost: cells.EMPTY_CELL if cost is None else TableCell(f"{cost:,.2f}", cost)),
    Column("dominates"),
    # Of the predicted number of images, also for a measured speed.
    Column("shown_time", "time", cells.as_is, in_csv=False),
    Column("shown_step_s", "per step", cells.seconds_cell, in_csv=False),
    Column("shown_rate", "images/s", cells.rate_cell, in_csv=False),
    Column("shown_start_up", "start-up", cells.share_cell, in_csv=False),
    Column("shown_hours", "GPU-hours", cells.number_cell, in_csv=False),
    Column("shown_part", "dominates", in_csv=False),
    Column("difference", "difference", cells.change_cell, in_csv=False),
)
# Columns of points, which a prediction from a run has not.
_POINT_KEYS: Final = ("fitted_s", "fitted_efficiency")


def prediction_rows(result: PredictionResult) -> ResultRows:
    """Return a row per number of ranks, measured or predicted."""
    columns = [column for column in _COLUMNS if result.points or column.key not in _POINT_KEYS]
    parts = dict.fromkeys(name for each in result.predictions for name in each.parts)
    images = "images" if result.has_several_images else ""
    main = f"ranks nodes rank_batch {images} shown_time speedup efficiency shown_step_s shown_rate shown_start_up "
    return ResultRows(
        [*columns, *(Column(f"part_{name}_s", clean_text(display_name(name)), cells.seconds_cell) for name in parts)],
        [
            *(_measured_record(result, point) for point in result.points),
            *(_predicted_record(each) for each in result.predictions),
        ],
        "Measured and predicted" if result.points else "Predictions",
        f"{main} shown_hours cost shown_part",
        "more ranks",
    )


def _measured_record(result: PredictionResult, point: MeasuredPoint) -> Record:
    time_s = result.time_of(point)
    start_up_s = result.start_up_s if _has_start_up(result.predictions) else None
    record = build_record(
        point,
        basis="measured",
        shown_time=TableCell(seconds(time_s), time_s, note="measured"),
        shown_start_up=None if start_up_s is None or not time_s > 0 else start_up_s / time_s,
        shown_hours=point.ranks * time_s / 3600,
        difference=point.fitted_s / point.time_s - 1 if point.time_s > 0 else None,
    )
    if result.is_of_speeds:  # only the fit separates the steps of a whole run from its start-up
        rate = point.images / point.time_s
        record |= {"shown_step_s": point.ranks * point.rank_batch / rate, "shown_rate": rate}
    return record


def _predicted_record(each: Predicted) -> Record:
    parts = {f"part_{name}_s": value for name, value in each.parts.items()}
    start_up_s = each.parts.get(_START_UP)
    return build_record(
        each,
        basis="predicted",
        shown_time=TableCell(seconds(each.time_s), each.time_s, note=_interval_text(each)),
        shown_step_s=each.step_s,
        shown_rate=each.images_per_s,
        shown_start_up=start_up_s / each.time_s if start_up_s and each.time_s > 0 else None,
        shown_hours=each.gpu_hours,
        shown_part=display_name(each.dominates),
        **parts,
    )


def _has_start_up(predictions: Sequence[Predicted]) -> bool:
    return any(each.parts.get(_START_UP) for each in predictions)


def build_prediction_page(report: ExperimentReport, result: PredictionResult) -> ReportPage:
    """Return the report of a prediction."""
    rows = prediction_rows(result)
    basis = _basis_blocks(result)
    points: list[Block] = []
    if result.points:
        measured = replace(rows, records=rows.records[: len(result.points)], more="more points")
        keys = "ranks nodes rank_batch images time_s fitted_s difference"
        points = [measured.table(keys, title="Measurements")]
    sections = [
        _time_section(result, rows),
        _parts_section(result, rows),
        PageSection("basis", "Basis", [*basis, *points]),
        report.build_provenance(result.command, (), result.provenance),
    ]
    return report.build_page(
        "Prediction",
        (f"{count(len(result.predictions), 'number')} of ranks predicted", "good"),
        [_BASIS_LABELS[result.basis], result.source, result.network],
        _prediction_figures(result),
        sections,
        summary=[rows.main_table(), *basis],
    )


def _prediction_figures(result: PredictionResult) -> list[KeyFigure]:
    if not result.predictions:
        return []
    most = max(result.predictions, key=lambda each: each.ranks)
    time_note = "; ".join(
        filter(None, (f"{_interval_text(most)} {_INTERVAL_LABELS[result.basis]}", _dominating_part(most)))
    )
    on_ranks = f"on {count(most.ranks, 'rank')}"
    cost = "" if most.cost is None else f"cost {most.cost:,.2f}"
    return [
        KeyFigure(f"time {on_ranks}", cells.seconds_cell(most.time_s), time_note),
        KeyFigure("efficiency", cells.share_cell(most.efficiency), on_ranks),
        KeyFigure("images/s", cells.rate_cell(most.images_per_s), on_ranks),
        KeyFigure("GPU-hours", cells.number_cell(most.gpu_hours), cost),
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


def _time_section(result: PredictionResult, rows: ResultRows) -> PageSection:
    fitted_s = [(point.ranks, result.time_of(point) * point.fitted_s / point.time_s) for point in result.points]
    measured_s = [(point.ranks, _positive_or_none(result.time_of(point))) for point in result.points]
    charts = [
        *([_throughput_chart(result)] if result.is_of_speeds else []),
        ranks_chart(
            "Time",
            "s",
            [
                _predicted_line(result, lambda each, time_s: time_s),
                chart_line("measured", measured_s),
                chart_line("fitted", [(ranks, _positive_or_none(time_s)) for ranks, time_s in fitted_s], marked=False),
            ],
            log_y=True,
        ),
        ranks_chart(
            "Speed-up",
            "over one rank",
            [
                _predicted_line(result, lambda each, time_s: _single_rank_s(each) / time_s),
                chart_line("measured", [(point.ranks, _positive_or_none(point.speedup)) for point in result.points]),
                chart_line("ideal", [(ranks, ranks) for ranks in _all_ranks(result)], marked=False),
            ],
            log_y=True,
        ),
        ranks_chart(
            "Efficiency",
            "% of the speed per rank",
            [
                _predicted_line(result, lambda each, time_s: 100 * _single_rank_s(each) / time_s / each.ranks),
                chart_line("measured", [(point.ranks, to_percent(point.efficiency)) for point in result.points]),
                chart_line(
                    "fitted",
                    [(point.ranks, to_percent(point.fitted_efficiency)) for point in result.points],
                    marked=False,
                ),
            ],
            rule=(100.0, "ideal"),
        ),
    ]
    blocks = chart_row(charts, "Nothing was predicted.")
    if result.has_several_images:
        blocks.append(Paragraph("Times are for different numbers of images, so they do not lie on one curve."))
    return PageSection("time", "Time over ranks", [*blocks, rows.main_table()])


def _throughput_chart(result: PredictionResult) -> Chart:
    base = min(result.points, key=lambda point: point.ranks)
    lines = [
        _predicted_line(result, lambda each, time_s: each.images / time_s),
        chart_line("measured", [(point.ranks, point.images / point.time_s) for point in result.points]),
        chart_line(
            "ideal",
            [(ranks, ranks / base.ranks * base.images / base.time_s) for ranks in _all_ranks(result)],
            marked=False,
        ),
    ]
    return ranks_chart("Throughput", "images/s", lines, log_y=True)


def _describe_efficiency(result: PredictionResult) -> str:
    """Return a sentence that defines speed-up and efficiency of a prediction from points."""
    fewest = count(min(point.ranks for point in result.points), "rank")
    what = "" if result.is_of_speeds else " of whole runs with their start-up"
    return (
        f"Speed-up is ranks times efficiency. Efficiency is images/s per rank{what}. Measured efficiency is relative "
        f"to {fewest} as measured, predicted efficiency to the fitted time of 1 rank."
    )


def _predicted_line(result: PredictionResult, read: Callable[[Predicted, float], float]) -> ChartLine:
    """Return `read(prediction, time)` over ranks, with intervals whose bounds are known."""
    values = []
    for each in result.predictions:
        if not each.time_s > 0:
            continue
        interval = Interval(value=read(each, each.time_s))
        if finite_or_none(each.low_s) and finite_or_none(each.high_s):
            low, high = sorted((read(each, each.low_s), read(each, each.high_s)))
            interval = Interval(value=interval.value, low=low, high=high)
        values.append((each.ranks, interval))
    return chart_line("predicted", values)


def _single_rank_s(each: Predicted) -> float:
    # Efficiency is t_1 / (n t_n), so this is t_1.
    return each.efficiency * each.ranks * each.time_s


def _all_ranks(result: PredictionResult) -> list[int]:
    return sorted({point.ranks for point in result.points} | {each.ranks for each in result.predictions})


def _positive_or_none(value: float | None) -> float | None:
    # A log axis has no place for 0.
    return value if value is not None and value > 0 else None


def _parts_section(result: PredictionResult, rows: ResultRows) -> PageSection | None:
    names = list(dict.fromkeys(name for each in result.predictions for name in each.parts))
    if not names:
        return None
    colours = {name: f"c-part-{index % _NUM_COLOURS}" for index, name in enumerate(names)}
    bar_rows = []
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
        bar_rows.append(BarRow(count(each.ranks, "rank"), segments, seconds(each.time_s)))
    legend = [(clean_text(display_name(name)), colours[name]) for name in names]
    bars = BarChart("Parts of the predicted time", bar_rows, legend, "shares of each prediction")
    keys = [f"part_{name}_s" for name in names]
    return PageSection("parts", "Dominant parts", [bars, rows.table("ranks", *keys, having=keys)])


def _basis_blocks(result: PredictionResult) -> list[Block]:
    blocks: list[Block] = [Paragraph(f"{_BASIS_VERBS[result.basis]} {clean_text(result.source, 300)}:")]
    blocks += [Command(clean_text(result.form, 2000))]
    terms = [(clean_text(name), cells.seconds_cell(value)) for name, value in result.terms.items()]
    blocks += [KeyValueList(terms, "Terms")] if terms else []
    sentences = [f"Collective times follow {clean_text(result.network, 300)}."] if result.network else []
    if result.start_up_s:
        last = max(result.points, key=lambda point: point.ranks)
        part = share(result.start_up_s / last.time_s)
        sentences.append(
            f"The start-up, f_s of the fit, is {part} of the run on {count(last.ranks, 'rank')}; more take as long."
        )
    if any(point.efficiency is not None for point in result.points):
        sentences.append(_describe_efficiency(result))
    if result.basis == "points":
        sentences.append(
            f"Intervals are nominally 95 %; on published tables, {_INTERVAL_COVERAGE} of them held the measurement."
        )
    sentences += [clean_text(note, 1000) for note in result.notes]
    return [*blocks, *map(Paragraph, sentences)]
