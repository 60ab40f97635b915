"""`paceline predict-scaling`: predict training time on more ranks, from a run or a table of measurements."""

import dataclasses
import math
import sys
from pathlib import Path
from typing import Final

from paceline.cli.experiment import finish_experiment, locked_experiment, show_experiment
from paceline.cli.options import PredictScalingOptions
from paceline.cli.scale_options import refuse_prediction_options
from paceline.core.errors import RecipeError
from paceline.core.experiments.results import PredictionResult
from paceline.core.run_dir import RunDir
from paceline.core.units import count
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
from paceline.report.experiment_common import ExperimentReport
from paceline.report.prediction_page import build_prediction_page
from paceline.report.render_terminal import print_page

DEFAULT_RANKS: Final = "8,16,32,64,128,256,512,1024,2048,4096"
RANKS_PER_NODE: Final = 8
"""Default ranks per node for predictions from a run; a table states its own."""
_MAX_RANKS: Final = 1_000_000


def predict_scaling(options: PredictScalingOptions) -> int:
    """Run `paceline predict-scaling`, and return the exit code. Raise `RecipeError` for invalid options."""
    refuse_prediction_options(options)
    return predict_points(options) if options.run is None else predict_run(options, options.run)


def predict_run(options: PredictScalingOptions, run: Path) -> int:
    """Predict from a run directory, and return the exit code. Raise `RecipeError` for invalid options."""
    images, epochs = options.images, options.epochs
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


def predict_points(options: PredictScalingOptions) -> int:
    """Predict from a table of measurements, and return the exit code.

    Raise `RecipeError` for invalid options, and `DataError` for an unusable table.
    """
    assert options.points is not None, "`refuse_prediction_options` has checked"
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


def parse_ranks(text: str, option: str = "--at") -> tuple[int, ...]:
    """Return the rank counts of `8,64,512`, in order. Raise `RecipeError` for an invalid one, of `option`."""
    items = [word.strip() for word in text.split(",")]
    wrong = next((word for word in items if not (word.isdecimal() and 0 < int(word) <= _MAX_RANKS)), None)
    if wrong is not None:
        raise RecipeError(f"{option}: {wrong!r} is not a number of ranks (write a list such as 8,64,512)")
    return tuple(dict.fromkeys(int(word) for word in items))


def _refuse_invalid_numbers(options: PredictScalingOptions) -> None:
    """Raise `RecipeError` for an option that is not finite and above 0; some may be 0."""
    for name in ("images", "epochs", "price", "gigabytes_per_s", "fixed_s", "alpha_us"):
        value, may_be_zero = getattr(options, name), name in ("fixed_s", "alpha_us")
        if value is not None and not (math.isfinite(value) and (value > 0 or (may_be_zero and value == 0))):
            least = "0 or more" if may_be_zero else "a number above 0"
            raise RecipeError(f"--{name.replace('_', '-')}: {value:g} is out of range (write {least})")


def output_prediction(
    result: PredictionResult, request: PredictionRequest, run_dir: Path | None, *, as_json: bool
) -> None:
    """Print the prediction, and write it to `run_dir` if given. Raise `RecipeError` if that holds something else."""
    result = result.model_copy(update={"command": ("paceline", *sys.argv[1:])})
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
        show_experiment(result, folder, as_json=as_json)
    elif as_json:
        print(result.model_dump_json(indent=2))
    else:
        print_page(build_prediction_page(ExperimentReport(Path("prediction")), result))
