"""What a prediction from a run, or from a table, is asked for."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Asked:
    """What is to be predicted: `images` in all, on `at` ranks of `rank_batch` images, `ranks_per_node` on a node.

    `price` is that of an hour of a rank, None where nobody asks.
    """

    at: tuple[int, ...]
    ranks_per_node: int
    rank_batch: int
    images: float
    price: float | None = None
