"""`paceline scale RUN --predict`: what a run would take on ranks that nobody has started, from its profile."""

import math
import sys
from pathlib import Path

from paceline.cli.show_prediction import show_prediction
from paceline.core.errors import RecipeError
from paceline.core.rundir import RunDir
from paceline.lab.predict.from_run import Asked, build_model, predict
from paceline.lab.predict.networks import build_network
from paceline.lab.predict.step import Step, read_step

DEFAULT_RANKS = "8,16,32,64,128,256,512,1024,2048,4096"
_PER_NODE = 8


def predict_run(
    run: Path,
    *,
    at: str = DEFAULT_RANKS,
    ranks_per_node: int = _PER_NODE,
    rank_batch: int | None = None,
    network: str | None = None,
    alpha_us: float | None = None,
    gigabytes_per_s: float | None = None,
    fixed_s: float | None = None,
    epochs: float | None = None,
    images: float | None = None,
    price: float | None = None,
    alone: Path | None = None,
    as_json: bool = False,
) -> int:
    """Do what `paceline scale RUN --predict` was asked for; return the exit code.

    `alone` is a run of one rank with the same rank batch, which tells what sending takes from computing; `epochs` are
    of the run's own training images, and `images` stands in their place. Raise `RecipeError` for what does not fit.
    """
    if epochs is not None and images is not None:
        raise RecipeError(f"--epochs: {epochs:g} and --images: {images:g} both say how long a run is (leave one out)")
    _refuse({"--images": images, "--epochs": epochs, "--price": price, "--gigabytes-per-s": gigabytes_per_s})
    _refuse({"--rank-batch": rank_batch, "--ranks-per-node": ranks_per_node})
    _refuse({"--fixed-s": fixed_s, "--alpha-us": alpha_us}, may_be_none=True)
    step = read_step(run, ranks_per_node=ranks_per_node)
    if fixed_s is not None:
        step = step.with_fixed(fixed_s)
    asked = Asked(
        at=parse_ranks(at),
        ranks_per_node=ranks_per_node,
        rank_batch=rank_batch or step.rank_batch,
        images=images or step.images * (epochs or 1.0),
        price=price,
    )
    known = build_network(network, ranks_per_node=ranks_per_node, alpha_us=alpha_us, gigabytes_per_s=gigabytes_per_s)
    found = predict(build_model(step, known, asked, _alone(alone)), asked)
    said = {"command": ("paceline", *sys.argv[1:]), "provenance": RunDir(run).read_result().provenance}
    show_prediction(found.model_copy(update=said), as_json=as_json)
    return 0


def parse_ranks(text: str) -> tuple[int, ...]:
    """Return the numbers of ranks in `8,64,512`, in their order. Raise `RecipeError` for what is none."""
    words = [word.strip() for word in text.split(",")]
    wrong = next((word for word in words if not (word.isdecimal() and 0 < int(word) <= 1_000_000)), None)
    if wrong is not None:
        raise RecipeError(f"--at: {wrong!r} is no number of ranks (write such as 8,64,512)")
    return tuple(dict.fromkeys(int(word) for word in words))


def _refuse(options: dict[str, float | None], *, may_be_none: bool = False) -> None:
    """Raise `RecipeError` for an option that is given and is no finite number above 0, or 0 where that may be."""
    for option, value in options.items():
        if value is not None and not (math.isfinite(value) and (value > 0 or (may_be_none and value == 0))):
            least = "0 or more" if may_be_none else "a number above 0"
            raise RecipeError(f"{option}: {value:g} makes no sense (write {least})")


def _alone(path: Path | None) -> Step | None:
    return None if path is None else read_step(path, ranks_per_node=1)
