"""Print a prediction beside the measurements: tables for people, JSON for programs."""

from collections.abc import Iterator
from typing import Final

from paceline.cli.show import print_rows
from paceline.cli.tables import print_table
from paceline.core.experiments.prediction import MeasuredPoint, Predicted, PredictionResult
from paceline.core.stages import display_name
from paceline.core.units import count, number, seconds, share
from paceline.report.experiments.prediction import describe_efficiency

_INTERVAL_NAME: Final = {"points": "95 % interval", "run": "likely range"}
_DOMINATED_COLUMN: Final = "dominated by"
_BLANK: Final = "-"
_INTERVAL_COVERAGE: Final = "88 %"
"""Share of intervals of published tables that held: benchmarks/results/prediction.json."""


def show_prediction(result: PredictionResult, *, as_json: bool) -> None:
    """Print measurements, predictions, what dominates them, and their basis."""
    if as_json:
        print(result.model_dump_json(indent=2))
        return
    images = ["images"] if result.has_several_images else []
    headings = ("ranks", *images, "time", _INTERVAL_NAME[result.basis], "speed-up", "efficiency")
    rows = [_measured_row(result, point) for point in result.points] + [
        _predicted_row(result, each) for each in result.predictions
    ]
    print_table(_prediction_title(result), headings, rows)
    print_table("speed and cost", *_speed_table(result), text_columns=(_DOMINATED_COLUMN,))
    print_rows(list(_basis_rows(result)), "basis of the prediction")


def _prediction_title(result: PredictionResult) -> str:
    first = result.predictions[0]
    return f"predicted for {count(first.images, 'image')}, {first.rank_batch} per rank and step: {result.source}"


def _measured_row(result: PredictionResult, point: MeasuredPoint) -> tuple[str, ...]:
    images = [f"{point.images:,.0f}"] if result.has_several_images else []
    return f"{point.ranks:,}", *images, seconds(result.time_of(point)), "measured", *_gain_cells(point)


def _predicted_row(result: PredictionResult, each: Predicted) -> tuple[str, ...]:
    images = [f"{each.images:,.0f}"] if result.has_several_images else []
    return (
        f"{each.ranks:,}",
        *images,
        seconds(each.time_s),
        f"{seconds(each.low_s)} to {seconds(each.high_s)}",
        *_gain_cells(each),
    )


def _gain_cells(each: MeasuredPoint | Predicted) -> tuple[str, str]:
    """Return speed-up and efficiency."""
    speedup = _BLANK if each.speedup is None else f"{each.speedup:,.2f}x"
    return speedup, _BLANK if each.efficiency is None else share(each.efficiency)


def _speed_table(result: PredictionResult) -> tuple[list[str], list[list[str]]]:
    """Return headings and rows of step time, speed, cost and dominating term.

    For a point measured as a whole run, only the fit separates steps from start-up; for speeds they are known.
    """
    has_cost = any(each.cost is not None for each in result.predictions)
    headings = ["ranks", "nodes", "step", "images/s", "GPU-hours", *(["cost"] if has_cost else []), _DOMINATED_COLUMN]
    rows = []
    for point in result.points:
        time_s, rate = result.time_of(point), point.images / point.time_s
        pace = [_BLANK, _BLANK]
        if result.is_of_speeds:
            pace = [seconds(point.ranks * point.rank_batch / rate), f"{rate:,.0f}"]
        cost = [_BLANK] if has_cost else []
        hours = number(point.ranks * time_s / 3600)
        rows.append([f"{point.ranks:,}", f"{point.nodes:,}", *pace, hours, *cost, _BLANK])
    for each in result.predictions:
        pace = [seconds(each.step_s), f"{each.images_per_s:,.0f}"]
        cost = [] if each.cost is None else [f"{each.cost:,.2f}"]
        most = display_name(each.dominates)
        rows.append([f"{each.ranks:,}", f"{each.nodes:,}", *pace, number(each.gpu_hours), *cost, most])
    return headings, rows


def _basis_rows(result: PredictionResult) -> Iterator[tuple[str, str]]:
    yield "formula", result.form
    for name, value in result.terms.items():
        yield name, seconds(value)
    if result.start_up_s:
        last = max(result.points, key=lambda point: point.ranks)
        startup_share = share(result.start_up_s / last.time_s)
        yield (
            "start-up",
            f"f_s, by the fit: {startup_share} of the run on {count(last.ranks, 'rank')}, and the same on more",
        )
    if any(point.efficiency is not None for point in result.points):
        yield "efficiency", describe_efficiency(result)
    if result.network:
        yield "network", result.network
    if result.basis == "points":
        yield (
            "interval",
            f"nominally 95 %; on published tables, {_INTERVAL_COVERAGE} of the intervals contained the measurement",
        )
    for note in result.notes:
        yield "note", note
