"""`paceline scale --predict --points FILE`: what other numbers of ranks would take, from a table of what some took."""

import math
import sys
from pathlib import Path

from paceline.cli.predict_run import parse_ranks
from paceline.cli.show_prediction import show_prediction
from paceline.core.errors import RecipeError
from paceline.lab.predict.from_points import ask, predict_from
from paceline.lab.predict.points import read_points


def predict_points(
    points: Path,
    *,
    at: str,
    ranks_per_node: int,
    rank_batch: int | None = None,
    images: float | None = None,
    price: float | None = None,
    as_json: bool = False,
) -> int:
    """Do what `paceline scale --predict --points` was asked for; return the exit code.

    `price` is that of an hour of a rank. Raise `RecipeError` for an option and `DataError` for a table that cannot be
    used.
    """
    _refuse("--ranks-per-node", ranks_per_node, "write how many ranks a node has")
    _refuse("--rank-batch", rank_batch, "write the images of a rank and step")
    _refuse("--images", images, "write how many images to predict for")
    _refuse("--price", price, "write what an hour of a rank costs")
    ranks = parse_ranks(at)
    found = read_points(points)
    asked = ask(found, ranks, ranks_per_node=ranks_per_node, rank_batch=rank_batch, images=images, price=price)
    show_prediction(
        predict_from(found, asked, source=str(points), command=("paceline", *sys.argv[1:])), as_json=as_json
    )
    return 0


def _refuse(option: str, value: float | None, fix: str) -> None:
    """Raise `RecipeError` where `value` is no finite number above 0."""
    if value is not None and not (math.isfinite(value) and value > 0):
        raise RecipeError(f"{option}: {value:g} is not above 0 ({fix})")
