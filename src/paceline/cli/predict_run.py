"""`paceline scale RUN --predict`: predict a run on more ranks from its profile."""

from pathlib import Path

from paceline.cli.leave_prediction import output_prediction
from paceline.cli.predict_words import DEFAULT_RANKS, RANKS_PER_NODE, parse_ranks, refuse_invalid_numbers
from paceline.core.errors import RecipeError
from paceline.core.rundir import RunDir
from paceline.lab.predict.asked import PredictionRequest
from paceline.lab.predict.from_run import build_step_model, predict_from_run
from paceline.lab.predict.networks import build_network
from paceline.lab.predict.step import MeasuredStep, check_same_recipe, read_measured_step


def predict_run(
    run: Path,
    *,
    at: str = DEFAULT_RANKS,
    ranks_per_node: int = RANKS_PER_NODE,
    rank_batch: int | None = None,
    network: str | None = None,
    alpha_us: float | None = None,
    gigabytes_per_s: float | None = None,
    fixed_s: float | None = None,
    epochs: float | None = None,
    images: float | None = None,
    price: float | None = None,
    alone: Path | None = None,
    run_dir: Path | None = None,
    as_json: bool = False,
) -> int:
    """Run `paceline scale RUN --predict`, and return the exit code.

    `alone` is a run of one rank with the same rank batch, which separates communication from computation. `epochs`
    counts the run's training images; `images` replaces it. Raise `RecipeError` for invalid options.
    """
    if epochs is not None and images is not None:
        raise RecipeError(
            f"--epochs: {epochs:g} and --images: {images:g} both set the length of the run (leave one out)"
        )
    refuse_invalid_numbers(
        {"--images": images, "--epochs": epochs, "--price": price, "--gigabytes-per-s": gigabytes_per_s}
    )
    refuse_invalid_numbers({"--rank-batch": rank_batch, "--ranks-per-node": ranks_per_node})
    refuse_invalid_numbers({"--fixed-s": fixed_s, "--alpha-us": alpha_us}, allow_zero=True)
    step = read_measured_step(run, ranks_per_node=ranks_per_node)
    if fixed_s is not None:
        step = step.with_fixed(fixed_s)
    request = PredictionRequest(
        at=parse_ranks(at),
        ranks_per_node=ranks_per_node,
        rank_batch=rank_batch or step.rank_batch,
        images=images or step.images * (epochs or 1.0),
        price=price,
    )
    known = build_network(network, ranks_per_node=ranks_per_node, alpha_us=alpha_us, gigabytes_per_s=gigabytes_per_s)
    prediction = predict_from_run(build_step_model(step, known, _read_single_rank(run, alone)), request)
    provenance = RunDir(run).read_result().provenance
    output_prediction(prediction.model_copy(update={"provenance": provenance}), request, run_dir, as_json=as_json)
    return 0


def _read_single_rank(run: Path, path: Path | None) -> MeasuredStep | None:
    if path is None:
        return None
    alone = read_measured_step(path, ranks_per_node=1)
    check_same_recipe(run, path)
    return alone
