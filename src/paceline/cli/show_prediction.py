"""Show a prediction: tables for a person, its JSON for a program."""

from collections.abc import Iterator

from paceline.cli.show import print_rows
from paceline.cli.tables import print_table
from paceline.core.experiments.prediction import Predicted, PredictionResult
from paceline.core.units import count, number, seconds, share

_WHOLE = ("ranks", "time", "95 % interval", "GPU hours")
_LAST = "dominated by"
_STEP = ("ranks", "nodes", "a step", "images/s", "efficiency")


def show_prediction(result: PredictionResult, *, as_json: bool) -> None:
    """Print what is predicted, what dominates it, and what it rests on."""
    if as_json:
        print(result.model_dump_json(indent=2))
        return
    priced = ["cost"] if any(each.cost is not None for each in result.predictions) else []
    whole = [_whole(each) for each in result.predictions]
    print_table(_title(result), (*_WHOLE, *priced, _LAST), whole, words=(_LAST,))
    print_table("a step", _STEP, [_step(each) for each in result.predictions])
    print_rows(list(_basis(result)), "what it rests on")


def _title(result: PredictionResult) -> str:
    first = result.predictions[0]
    return f"predicted for {count(first.images, 'image')}, {first.rank_batch} a rank and step: {result.source}"


def _whole(each: Predicted) -> tuple[str, ...]:
    where = f"{seconds(each.low_s)} to {seconds(each.high_s)}"
    cost = [] if each.cost is None else [f"{each.cost:,.2f}"]
    hours, most = number(each.gpu_hours), each.dominates.replace("_", "-")
    return f"{each.ranks:,}", seconds(each.time_s), where, hours, *cost, most


def _step(each: Predicted) -> tuple[str, ...]:
    speed = f"{each.images_per_s:,.0f}"
    return f"{each.ranks:,}", f"{each.nodes:,}", seconds(each.step_s), speed, share(each.efficiency)


def _basis(result: PredictionResult) -> Iterator[tuple[str, str]]:
    yield "formula", result.form
    for name, value in result.terms.items():
        yield name, seconds(value)
    if result.network:
        yield "network", result.network
    for note in result.notes:
        yield "note", note
