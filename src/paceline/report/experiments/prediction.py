"""The page of a prediction: what is said of ranks that were not measured, and what that rests on."""

from dataclasses import replace
from typing import Final

from paceline.core.experiments.prediction import Predicted, PredictionResult
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
_FROM: Final = {"points": "Fitted to", "run": "Reckoned from"}
_SURE: Final = {"points": SURE, "run": "is likely"}
_BASIS: Final = {"points": "from a table of times", "run": "from a run and a network"}


def summary(result: PredictionResult) -> Table:
    """Return the predictions, a row a number of ranks; how many images where that differs."""
    has_images, has_cost = len(_images(result)) > 1, any(each.cost is not None for each in result.predictions)
    titles = ["ranks", "nodes", "of a rank", *(["images"] if has_images else [])]
    titles += ["time", "a step", "images/s", "efficiency"]
    titles += ["GPU-hours", *(["cost"] if has_cost else [])]
    columns = [*map(Column, titles), Column("dominates", is_number=False, is_wide=True)]
    rows = [_row(each, has_images=has_images, has_cost=has_cost) for each in result.predictions]
    return Table("Predictions", columns, rows, MANY, "more ranks")


def prediction_page(told: Told, result: PredictionResult) -> Page:
    """Return the report of a prediction."""
    subtitle = [_BASIS[result.basis], result.source, result.network]
    sections = [_time(result), _parts(result), _basis(result), told.origin(result.command, (), result.provenance)]
    status = f"{count(len(result.predictions), 'number')} of ranks predicted"
    return told.page("Prediction", (status, "good"), subtitle, _figures(result), sections)


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
    """Return the interval in words; that of points that tell too little has no upper end."""
    if finite(each.high_s) is None:
        return f"{seconds(each.low_s)} or more"
    return f"{seconds(each.low_s)} to {seconds(each.high_s)}"


def _dominates(each: Predicted) -> str:
    return f"the largest part besides computing is {clean(spoken(each.dominates))}" if each.dominates else ""


def _time(result: PredictionResult) -> Section:
    predicted = result.predictions
    lines = [
        replace(plain("predicted", [(each.ranks, _drawn(each.time_s)) for each in predicted]), bounds=_bounds(result)),
        plain("measured", [(point.ranks, _drawn(point.time_s)) for point in result.points]),
        plain("fitted", [(point.ranks, _drawn(point.fitted_s)) for point in result.points], marked=False),
    ]
    lines = [line for line in lines if line.points]
    charts = [Chart("Time", "ranks", "s", lines, low=None, log_x=True, log_y=True)] if lines else []
    line = plain("predicted", [(each.ranks, 100 * each.efficiency) for each in predicted])
    if line.points:
        charts.append(
            Chart("Efficiency", "ranks", "% of the speed per rank", [line], rule=(100.0, "ideal"), log_x=True)
        )
    blocks: list[Block] = [Charts(charts)] if charts else [cells.missing("Nothing was predicted.")]
    if len(_images(result)) > 1:
        blocks.append(Paragraph("Times are of different numbers of images, so they do not lie on one curve."))
    return Section("time", "Time over ranks", [*blocks, summary(result)])


def _drawn(time_s: float) -> float | None:
    """Return a time that has a place on a logarithmic axis."""
    return time_s if time_s > 0 else None


def _bounds(result: PredictionResult) -> dict[Point, tuple[float, float]]:
    """Return the intervals that can be drawn: those that end."""
    return {
        (each.ranks, each.time_s): (each.low_s, each.high_s)
        for each in result.predictions
        if finite(each.low_s) is not None and finite(each.high_s) is not None
    }


def _parts(result: PredictionResult) -> Section | None:
    """Return what each prediction is made of, as shares of its time."""
    names = list(dict.fromkeys(name for each in result.predictions for name in each.parts))
    if not names:
        return None
    colours = {name: f"c-part-{index % _NUM_COLOURS}" for index, name in enumerate(names)}
    rows = []
    for each in result.predictions:
        whole = sum(value for value in each.parts.values() if value > 0) or 1.0
        found = [Part(clean(spoken(name)), value / whole, f"{seconds(value)}, {share(value / whole)}",
                      colours[name])
                 for name, value in each.parts.items() if value > 0]  # fmt: skip
        rows.append(BarRow(count(each.ranks, "rank"), found, seconds(each.time_s)))
    legend = [(clean(spoken(name)), colours[name]) for name in names]
    titles = ["ranks", *map(spoken, names)]
    table = [[cells.count(each.ranks), *(intervals.maybe_seconds(each.parts.get(name)) for name in names)]
             for each in result.predictions]  # fmt: skip
    bars = Bars("Of what the time is made", rows, legend, "shares of each")
    parts = Table("", [Column(clean(each)) for each in titles], table, MANY, "more ranks")
    return Section("parts", "What dominates", [bars, parts])


def _basis(result: PredictionResult) -> Section:
    """Return the formula, its coefficients, and how well it tells what was measured."""
    blocks: list[Block] = [Paragraph(f"{_FROM[result.basis]} {clean(result.source, 300)}:")]
    blocks += [Paragraph(f"Collectives are reckoned with {clean(result.network, 300)}.")] if result.network else []
    blocks += [Command(clean(result.form, 2000))]
    terms = [(clean(name), Cell(seconds(value), value)) for name, value in result.terms.items()]
    blocks += [Facts(terms, "Its terms")] if terms else []
    titles = ("ranks", "nodes", "of a rank", "images", "measured", "fitted", "difference")
    rows = [
        [cells.count(point.ranks), cells.count(point.nodes), cells.count(point.rank_batch), cells.count(point.images),
         cells.of_seconds(point.time_s), cells.of_seconds(point.fitted_s), _difference(point.fitted_s, point.time_s)]
        for point in result.points
    ]  # fmt: skip
    blocks += [Table("What was measured", [Column(each) for each in titles], rows, MANY, "more points")] if rows else []
    blocks += [Paragraph(clean(note, 1000)) for note in result.notes]
    return Section("basis", "What it rests on", blocks)


def _difference(fitted_s: float, time_s: float) -> Cell:
    if not time_s > 0:
        return Cell("")
    change = fitted_s / time_s - 1
    return Cell(f"{100 * change:+.1f} %", change)


def _images(result: PredictionResult) -> set[float]:
    return {each.images for each in result.predictions} | {point.images for point in result.points}


def _cost(cost: float) -> str:
    return f"{cost:,.2f}"


def _row(each: Predicted, *, has_images: bool, has_cost: bool) -> list[Cell]:
    return [
        cells.count(each.ranks),
        cells.count(each.nodes),
        cells.count(each.rank_batch),
        *([cells.count(each.images)] if has_images else []),
        Cell(seconds(each.time_s), each.time_s, note=_within(each)),
        cells.of_seconds(each.step_s),
        Cell(intervals.rate(each.images_per_s), each.images_per_s),
        cells.of_share(each.efficiency),
        Cell(number(each.gpu_hours), each.gpu_hours),
        *([Cell("" if each.cost is None else _cost(each.cost), each.cost)] if has_cost else []),
        intervals.sentence(spoken(each.dominates)),
    ]
