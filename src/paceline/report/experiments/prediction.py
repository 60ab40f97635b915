"""Build the page of a prediction: measured and predicted ranks, and the basis of the prediction."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from paceline.core.experiments.prediction import MeasuredPoint, Predicted, PredictionResult
from paceline.core.stages import spoken
from paceline.core.units import count, number, seconds, share
from paceline.report.blocks import (
    BarRow,
    Bars,
    Block,
    Cell,
    Chart,
    Charts,
    Column,
    Command,
    Facts,
    Figure,
    Line,
    Page,
    Paragraph,
    Part,
    Section,
    Table,
)
from paceline.report.experiments.curves import plain
from paceline.report.experiments.frame import MANY, SURE, Told
from paceline.report.sections import cells, intervals
from paceline.report.thin import Point
from paceline.report.words import clean, finite

_NUM_COLOURS: Final = 6
_START_UP: Final = "start_up"
_FROM: Final = {"points": "Fitted to", "run": "Computed from"}
_SURE: Final = {"points": SURE, "run": "is likely"}
_BASIS: Final = {"points": "from a table of times", "run": "from a run and a network"}


def summary(result: PredictionResult) -> Table:
    """Return a row per number of ranks, measured or predicted, with the number of images if it varies."""
    has_cost = any(each.cost is not None for each in result.predictions)
    has_start_up = any(each.parts.get(_START_UP) for each in result.predictions)
    titles = ["nodes", "batch per rank", *(["images"] if result.has_several_images else [])]
    titles += ["time", "speed-up", "efficiency", "per step", "images/s"]
    titles += [*(["start-up"] if has_start_up else []), "GPU-hours", *(["cost"] if has_cost else [])]
    columns = [Column("ranks"), *map(Column, titles), Column("dominates", is_number=False)]
    rows = [_measured(result, point, has_start_up=has_start_up, has_cost=has_cost) for point in result.points]
    rows += [_row(result, each, has_start_up=has_start_up, has_cost=has_cost) for each in result.predictions]
    return Table("Measured and predicted" if result.points else "Predictions", columns, rows, MANY, "more ranks")


def prediction_page(report: Told, result: PredictionResult) -> Page:
    """Return the report of a prediction."""
    subtitle = [_BASIS[result.basis], result.source, result.network]
    sections = [_time(result), _parts(result), _basis(result), report.origin(result.command, (), result.provenance)]
    status = f"{count(len(result.predictions), 'number')} of ranks predicted"
    return report.page("Prediction", (status, "good"), subtitle, _figures(result), sections)


def _figures(result: PredictionResult) -> list[Figure]:
    if not result.predictions:
        return []
    most = max(result.predictions, key=lambda each: each.ranks)
    time_note = "; ".join(filter(None, (f"{_within(most)} {_SURE[result.basis]}", _dominates(most))))
    return [
        Figure(f"time on {count(most.ranks, 'rank')}", cells.of_seconds(most.time_s), time_note),
        Figure("efficiency", cells.of_share(most.efficiency), f"on {count(most.ranks, 'rank')}"),
        Figure(
            "images/s", Cell(intervals.rate(most.images_per_s), most.images_per_s), f"on {count(most.ranks, 'rank')}"
        ),
        Figure("GPU-hours", cells.plain(most.gpu_hours), "" if most.cost is None else f"cost {_cost(most.cost)}"),
    ]


def _within(each: Predicted) -> str:
    # Too few points give no upper bound.
    if finite(each.high_s) is None:
        return f"{seconds(each.low_s)} or more"
    return f"{seconds(each.low_s)} to {seconds(each.high_s)}"


def _dominates(each: Predicted) -> str:
    return f"the largest part besides computation is {clean(spoken(each.dominates))}" if each.dominates else ""


def _time(result: PredictionResult) -> Section:
    fitted_s = [(point.ranks, result.time_of(point) * point.fitted_s / point.time_s) for point in result.points]
    charts = [
        *([_throughput(result)] if result.is_of_speeds else []),
        _chart("Time", "s", [
            _predictions(result, lambda each, time_s: time_s),
            plain("measured", [(point.ranks, _drawn(result.time_of(point))) for point in result.points]),
            plain("fitted", [(ranks, _drawn(time_s)) for ranks, time_s in fitted_s], marked=False),
        ], log_y=True),
        _chart("Speed-up", "over one rank", [
            _predictions(result, lambda each, time_s: _alone_s(each) / time_s),
            plain("measured", [(point.ranks, _drawn(point.speedup)) for point in result.points]),
            plain("ideal", [(ranks, ranks) for ranks in _all_ranks(result)], marked=False),
        ], log_y=True),
        _chart("Efficiency", "% of the speed per rank", [
            _predictions(result, lambda each, time_s: 100 * _alone_s(each) / time_s / each.ranks),
            plain("measured", [(point.ranks, _percent(point.efficiency)) for point in result.points]),
            plain("fitted", [(point.ranks, _percent(point.fitted_efficiency)) for point in result.points],
                  marked=False),
        ], rule=(100.0, "ideal")),
    ]  # fmt: skip
    charts = [chart for chart in charts if any(line.points for line in chart.lines if line.name != "ideal")]
    blocks: list[Block] = [Charts(charts)] if charts else [cells.missing("Nothing was predicted.")]
    if result.has_several_images:
        blocks.append(Paragraph("Times are for different numbers of images, so they do not lie on one curve."))
    if any(point.efficiency is not None for point in result.points):
        blocks.append(Paragraph(efficiency_of(result)))
    return Section("time", "Time over ranks", [*blocks, summary(result)])


def _throughput(result: PredictionResult) -> Chart:
    base = min(result.points, key=lambda point: point.ranks)
    lines = [
        _predictions(result, lambda each, time_s: each.images / time_s),
        plain("measured", [(point.ranks, point.images / point.time_s) for point in result.points]),
        plain("ideal", [(ranks, ranks / base.ranks * base.images / base.time_s) for ranks in _all_ranks(result)],
              marked=False),
    ]  # fmt: skip
    return _chart("Throughput", "images/s", lines, log_y=True)


def efficiency_of(result: PredictionResult) -> str:
    """Return a sentence that defines speed-up and efficiency of a prediction from points."""
    fewest = count(min(point.ranks for point in result.points), "rank")
    what = "" if result.is_of_speeds else " of whole runs with their start-up"
    return (
        f"Speed-up is ranks times efficiency. Efficiency is images/s per rank{what}. Measured efficiency is relative "
        f"to {fewest} as measured, predicted efficiency to the fitted time of 1 rank."
    )


def _chart(title: str, unit: str, lines: Sequence[Line], rule: tuple[float, str] | None = None,
           *, log_y: bool = False) -> Chart:  # fmt: skip
    lines = [line for line in lines if line.points]
    return Chart(title, "ranks", unit, lines, low=None if log_y else 0.0, rule=rule, log_x=True, log_y=log_y)


def _predictions(result: PredictionResult, read: Callable[[Predicted, float], float]) -> Line:
    """Return a line of `read(prediction, time)` over ranks, with intervals where both bounds are known."""
    points: list[tuple[float, float | None]] = []
    bounds: dict[Point, tuple[float, float]] = {}
    for each in result.predictions:
        if not each.time_s > 0:
            continue
        value = read(each, each.time_s)
        points.append((each.ranks, value))
        if finite(each.low_s) and finite(each.high_s):
            ends = sorted((read(each, each.low_s), read(each, each.high_s)))
            bounds[each.ranks, value] = (ends[0], ends[1])
    return replace(plain("predicted", points), bounds=bounds)


def _alone_s(each: Predicted) -> float:
    return each.efficiency * each.ranks * each.time_s


def _all_ranks(result: PredictionResult) -> list[int]:
    return sorted({point.ranks for point in result.points} | {each.ranks for each in result.predictions})


def _drawn(value: float | None) -> float | None:
    # A log axis has no place for 0.
    return value if value is not None and value > 0 else None


def _percent(value: float | None) -> float | None:
    return None if value is None else 100 * value


def _parts(result: PredictionResult) -> Section | None:
    names = list(dict.fromkeys(name for each in result.predictions for name in each.parts))
    if not names:
        return None
    colours = {name: f"c-part-{index % _NUM_COLOURS}" for index, name in enumerate(names)}
    rows = []
    for each in result.predictions:
        whole = sum(value for value in each.parts.values() if value > 0) or 1.0
        segments = [Part(clean(spoken(name)), value / whole, f"{seconds(value)}, {share(value / whole)}",
                      colours[name])
                 for name, value in each.parts.items() if value > 0]  # fmt: skip
        rows.append(BarRow(count(each.ranks, "rank"), segments, seconds(each.time_s)))
    legend = [(clean(spoken(name)), colours[name]) for name in names]
    titles = ["ranks", *map(spoken, names)]
    table = [[cells.count(each.ranks), *(intervals.maybe_seconds(each.parts.get(name)) for name in names)]
             for each in result.predictions]  # fmt: skip
    bars = Bars("Parts of the predicted time", rows, legend, "shares of each prediction")
    parts = Table("", [Column(clean(each)) for each in titles], table, MANY, "more ranks")
    return Section("parts", "Dominant parts", [bars, parts])


def _basis(result: PredictionResult) -> Section:
    blocks: list[Block] = [Paragraph(f"{_FROM[result.basis]} {clean(result.source, 300)}:")]
    blocks += [Paragraph(f"Collective times follow {clean(result.network, 300)}.")] if result.network else []
    blocks += [Command(clean(result.form, 2000))]
    terms = [(clean(name), Cell(seconds(value), value)) for name, value in result.terms.items()]
    blocks += [Facts(terms, "Terms")] if terms else []
    titles = ("ranks", "nodes", "batch per rank", "images", "measured", "fitted", "difference")
    rows = [
        [cells.count(point.ranks), cells.count(point.nodes), cells.count(point.rank_batch), cells.count(point.images),
         cells.of_seconds(point.time_s), cells.of_seconds(point.fitted_s), _difference(point.fitted_s, point.time_s)]
        for point in result.points
    ]  # fmt: skip
    blocks += [Table("Measurements", [Column(each) for each in titles], rows, MANY, "more points")] if rows else []
    blocks += [Paragraph(clean(note, 1000)) for note in result.notes]
    return Section("basis", "Basis", blocks)


def _difference(fitted_s: float, time_s: float) -> Cell:
    if not time_s > 0:
        return Cell("")
    change = fitted_s / time_s - 1
    return Cell(f"{100 * change:+.1f} %", change)


def _cost(cost: float) -> str:
    return f"{cost:,.2f}"


def _measured(result: PredictionResult, point: MeasuredPoint, *, has_start_up: bool, has_cost: bool) -> list[Cell]:
    # Only points that are speeds have a step time.
    time_s, hours = result.time_of(point), point.ranks * result.time_of(point) / 3600
    pace = [intervals.NOTHING, intervals.NOTHING]
    if result.is_of_speeds:
        rate = point.images / point.time_s
        pace = [cells.of_seconds(point.ranks * point.rank_batch / rate), Cell(intervals.rate(rate), rate)]
    return [
        cells.count(point.ranks),
        cells.count(point.nodes),
        cells.count(point.rank_batch),
        *([cells.count(point.images)] if result.has_several_images else []),
        Cell(seconds(time_s), time_s, note="measured"),
        *_gain(point),
        *pace,
        *([_of_run(result.start_up_s, time_s)] if has_start_up else []),
        Cell(number(hours), hours),
        *([intervals.NOTHING] if has_cost else []),
        intervals.NOTHING,
    ]


def _gain(each: MeasuredPoint | Predicted) -> list[Cell]:
    speedup = intervals.NOTHING if each.speedup is None else Cell(f"{each.speedup:,.2f}x", each.speedup)
    return [speedup, intervals.maybe_share(each.efficiency)]


def _of_run(part_s: float | None, time_s: float) -> Cell:
    return intervals.NOTHING if part_s is None or not time_s > 0 else cells.of_share(part_s / time_s)


def _row(result: PredictionResult, each: Predicted, *, has_start_up: bool, has_cost: bool) -> list[Cell]:
    return [
        cells.count(each.ranks),
        cells.count(each.nodes),
        cells.count(each.rank_batch),
        *([cells.count(each.images)] if result.has_several_images else []),
        Cell(seconds(each.time_s), each.time_s, note=_within(each)),
        *_gain(each),
        cells.of_seconds(each.step_s),
        Cell(intervals.rate(each.images_per_s), each.images_per_s),
        *([_of_run(each.parts.get(_START_UP), each.time_s)] if has_start_up else []),
        Cell(number(each.gpu_hours), each.gpu_hours),
        *([Cell("" if each.cost is None else _cost(each.cost), each.cost)] if has_cost else []),
        intervals.sentence(spoken(each.dominates)),
    ]
