"""What to predict."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PredictionRequest:
    """What to predict: `images` in all, on `at` ranks with `rank_batch` images each, `ranks_per_node` per node.

    `price` is per rank and hour, None if not wanted.
    """

    at: tuple[int, ...]
    ranks_per_node: int
    rank_batch: int
    images: float
    price: float | None = None
