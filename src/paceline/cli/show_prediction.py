"""Show a prediction: tables for a person, its JSON for a program."""

from collections.abc import Iterator
from typing import Final

from paceline.cli.show import print_rows
from paceline.cli.tables import print_table
from paceline.core.experiments.prediction import Predicted, PredictionResult
from paceline.core.stages import spoken
from paceline.core.units import count, number, seconds, share

_RANGE: Final = {"points": "95 % interval", "run": "likely range"}
_LAST: Final = "dominated by"
_SPEED: Final = ("ranks", "nodes", "a step", "images/s", "GPU-hours")
_HELD: Final = "88 %"
"""How many of the intervals of published tables held: benchmarks/results/prediction.json."""


def show_prediction(result: PredictionResult, *, as_json: bool) -> None:
    """Print what is predicted, what dominates it, and what it rests on."""
    if as_json:
        print(result.model_dump_json(indent=2))
        return
    priced = ["cost"] if any(each.cost is not None for each in result.predictions) else []
    headings = ("ranks", "time", _RANGE[result.basis], "efficiency", _LAST)
    print_table(_title(result), headings, [_whole(each) for each in result.predictions], words=(_LAST,))
    print_table("speed and cost", (*_SPEED, *priced), [_speed(each) for each in result.predictions])
    print_rows(list(_basis(result)), "what it rests on")


def _title(result: PredictionResult) -> str:
    first = result.predictions[0]
    return f"predicted for {count(first.images, 'image')}, {first.rank_batch} a rank and step: {result.source}"


def _whole(each: Predicted) -> tuple[str, ...]:
    where, most = f"{seconds(each.low_s)} to {seconds(each.high_s)}", spoken(each.dominates)
    return f"{each.ranks:,}", seconds(each.time_s), where, share(each.efficiency), most


def _speed(each: Predicted) -> tuple[str, ...]:
    cost = [] if each.cost is None else [f"{each.cost:,.2f}"]
    speed, hours = f"{each.images_per_s:,.0f}", number(each.gpu_hours)
    return f"{each.ranks:,}", f"{each.nodes:,}", seconds(each.step_s), speed, hours, *cost


def _basis(result: PredictionResult) -> Iterator[tuple[str, str]]:
    yield "formula", result.form
    for name, value in result.terms.items():
        yield name, seconds(value)
    if result.network:
        yield "network", result.network
    if result.basis == "points":
        yield "interval", f"meant for 95 %; {_HELD} of those of published tables held what was measured"
    for note in result.notes:
        yield "note", note
