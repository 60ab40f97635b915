"""`paceline scale --predict`: predict training time on more ranks, from a run or a table of measurements."""

import dataclasses
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from paceline.cli.experiment import finish_experiment, locked_experiment
from paceline.cli.options import ScaleOptions
from paceline.cli.tables import print_rows, print_table
from paceline.core.errors import RecipeError
from paceline.core.experiments.results import MeasuredPoint, Predicted, PredictionResult
from paceline.core.run_dir import RunDir
from paceline.core.stages import display_name
from paceline.core.units import count, number, seconds, share
from paceline.data.files import printable
from paceline.lab.predict.from_points import build_request, predict_from_points
from paceline.lab.predict.from_run import (
    MeasuredStep,
    build_step_model,
    check_same_recipe,
    predict_from_run,
    read_measured_step,
)
from paceline.lab.predict.network import build_network
from paceline.lab.predict.points import PredictionRequest, read_points
from paceline.report.prediction_page import describe_efficiency

DEFAULT_RANKS: Final = "8,16,32,64,128,256,512,1024,2048,4096"
RANKS_PER_NODE: Final = 8
"""Default ranks per node for predictions from a run; a table states its own."""
_MAX_RANKS: Final = 1_000_000
_INTERVAL_NAME: Final = {"points": "95 % interval", "run": "likely range"}
_DOMINATED_COLUMN: Final = "dominated by"
_BLANK: Final = "-"
_INTERVAL_COVERAGE: Final = "88 %"
"""Share of intervals of published tables that held: benchmarks/results/prediction.json."""


def predict_run(options: ScaleOptions) -> int:
    """Run `paceline scale RUN --predict`, and return the exit code. Raise `RecipeError` for invalid options."""
    run, images, epochs = Path(options.args[0]), options.images, options.epochs
    if epochs is not None and images is not None:
        raise RecipeError(
            f"--epochs: {epochs:g} and --images: {images:g} both set the length of the run (leave one out)"
        )
    _refuse_invalid_numbers(options)
    ranks_per_node = options.ranks_per_node or RANKS_PER_NODE
    step = read_measured_step(run, ranks_per_node=ranks_per_node)
    if options.fixed_s is not None:
        step = dataclasses.replace(step, fixed_s=options.fixed_s)
    request = PredictionRequest(
        at=parse_ranks(DEFAULT_RANKS if options.at is None else options.at),
        ranks_per_node=ranks_per_node,
        rank_batch=options.rank_batch or step.rank_batch,
        images=images or step.images * (epochs or 1.0),
        price=options.price,
    )
    network = build_network(
        options.network,
        ranks_per_node=ranks_per_node,
        alpha_us=options.alpha_us,
        gigabytes_per_s=options.gigabytes_per_s,
    )
    # A run of one rank with the same rank batch separates communication from computation.
    prediction = predict_from_run(build_step_model(step, network, _read_single_rank(run, options.alone)), request)
    provenance = RunDir(run).read_result().provenance
    output_prediction(
        prediction.model_copy(update={"provenance": provenance}), request, options.run_dir, as_json=options.as_json
    )
    return 0


def _read_single_rank(run: Path, path: Path | None) -> MeasuredStep | None:
    if path is None:
        return None
    alone = read_measured_step(path, ranks_per_node=1)
    check_same_recipe(run, path)
    return alone


def predict_points(options: ScaleOptions) -> int:
    """Run `paceline scale --predict --points`, and return the exit code.

    Raise `RecipeError` for invalid options, and `DataError` for an unusable table.
    """
    assert options.points is not None, "this mode has --points"
    _refuse_invalid_numbers(options)
    ranks, table = parse_ranks(DEFAULT_RANKS if options.at is None else options.at), read_points(options.points)
    on_node = options.ranks_per_node or max(-(-point.ranks // point.nodes) for point in table)
    request = build_request(
        table,
        ranks,
        ranks_per_node=on_node,
        rank_batch=options.rank_batch,
        images=options.images,
        price=options.price,
    )
    prediction = predict_from_points(table, request, source=str(options.points))
    if options.ranks_per_node is None:
        taken = f"nodes: {count(on_node, 'rank')} on each, the largest of the table (set --ranks-per-node to change it)"
        prediction = prediction.model_copy(update={"notes": (*prediction.notes, taken)})
    output_prediction(prediction, request, options.run_dir, as_json=options.as_json)
    return 0


def parse_ranks(text: str) -> tuple[int, ...]:
    """Return the rank counts of `8,64,512`, in order. Raise `RecipeError` for an invalid one."""
    items = [word.strip() for word in text.split(",")]
    wrong = next((word for word in items if not (word.isdecimal() and 0 < int(word) <= _MAX_RANKS)), None)
    if wrong is not None:
        raise RecipeError(f"--at: {wrong!r} is not a number of ranks (write a list such as 8,64,512)")
    return tuple(dict.fromkeys(int(word) for word in items))


def _refuse_invalid_numbers(options: ScaleOptions) -> None:
    """Raise `RecipeError` for an option that is not finite and above 0; some may be 0."""
    for name in ("images", "epochs", "price", "gigabytes_per_s", "fixed_s", "alpha_us"):
        value, may_be_zero = getattr(options, name), name in ("fixed_s", "alpha_us")
        if value is not None and not (math.isfinite(value) and (value > 0 or (may_be_zero and value == 0))):
            least = "0 or more" if may_be_zero else "a number above 0"
            raise RecipeError(f"--{name.replace('_', '-')}: {value:g} is out of range (write {least})")


def show_prediction(result: PredictionResult, *, as_json: bool) -> None:
    """Print measurements, predictions and their basis."""
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
    speedup = _BLANK if each.speedup is None else f"{each.speedup:,.2f}x"
    return speedup, _BLANK if each.efficiency is None else share(each.efficiency)


def _speed_table(result: PredictionResult) -> tuple[list[str], list[list[str]]]:
    """Return headings and rows of step time, speed, cost and dominating term."""
    has_cost = any(each.cost is not None for each in result.predictions)
    headings = ["ranks", "nodes", "step", "images/s", "GPU-hours", *(["cost"] if has_cost else []), _DOMINATED_COLUMN]
    rows = []
    for point in result.points:
        time_s, rate = result.time_of(point), point.images / point.time_s
        pace = [_BLANK, _BLANK]
        # For a point measured as a whole run, only the fit separates steps from start-up.
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


def output_prediction(
    result: PredictionResult, request: PredictionRequest, run_dir: Path | None, *, as_json: bool
) -> None:
    """Print the prediction, and write it to `run_dir` if given. Raise `RecipeError` if that holds something else."""
    result = result.model_copy(update={"command": ("paceline", *sys.argv[1:])})
    out = sys.stderr if as_json else sys.stdout
    if run_dir is not None:
        fields = {
            "source": result.source,
            "network": result.network,
            **dataclasses.asdict(request),
            "at": [*request.at],
        }
        whole = {"experiment": "prediction", **fields}
        with locked_experiment("prediction", whole, run_dir, as_json=as_json) as folder:
            finish_experiment(folder, result)
    show_prediction(result, as_json=as_json)
    if run_dir is not None:
        print(f"folder: {printable(run_dir)}", file=out)
