"""When an accuracy was met. One rule, by which runs stop, studies count and reports compare."""

from collections.abc import Iterable


def met_at(accuracies: Iterable[float], level: float, patience: int = 1) -> int | None:
    """Return the place, from 0, of the evaluation with which `level` was met; None where it never was.

    That is the last of the first `patience` evaluations in a row to reach it, as `train.stop` has it.
    """
    hits = 0
    for place, accuracy in enumerate(accuracies):
        hits = hits + 1 if accuracy >= level else 0
        if hits >= patience:
            return place
    return None
