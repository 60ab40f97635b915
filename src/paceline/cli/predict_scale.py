"""`paceline scale --predict --points FILE`: predict other rank counts from a table of measurements."""

from pathlib import Path

from paceline.cli.leave_prediction import output_prediction
from paceline.cli.predict_words import DEFAULT_RANKS, parse_ranks, refuse_invalid_numbers
from paceline.core.units import count
from paceline.lab.predict.from_points import build_request, predict_from_points
from paceline.lab.predict.points import read_points


def predict_points(
    points: Path,
    *,
    at: str = DEFAULT_RANKS,
    ranks_per_node: int | None = None,
    rank_batch: int | None = None,
    images: float | None = None,
    price: float | None = None,
    run_dir: Path | None = None,
    as_json: bool = False,
) -> int:
    """Run `paceline scale --predict --points`, and return the exit code.

    `ranks_per_node` defaults to the largest of the table; `price` is per rank-hour. Raise `RecipeError` for invalid
    options, and `DataError` for an unusable table.
    """
    refuse_invalid_numbers(
        {"--ranks-per-node": ranks_per_node, "--rank-batch": rank_batch, "--images": images, "--price": price}
    )
    ranks, table = parse_ranks(at), read_points(points)
    on_node = ranks_per_node or max(-(-point.ranks // point.nodes) for point in table)
    request = build_request(table, ranks, ranks_per_node=on_node, rank_batch=rank_batch, images=images, price=price)
    prediction = predict_from_points(table, request, source=str(points))
    if ranks_per_node is None:
        taken = f"nodes: {count(on_node, 'rank')} on each, the largest of the table (set --ranks-per-node to change it)"
        prediction = prediction.model_copy(update={"notes": (*prediction.notes, taken)})
    output_prediction(prediction, request, run_dir, as_json=as_json)
    return 0
