"""When an accuracy was met, in runs that have ended: for studies and reports, by the rule that `train.stop` has."""

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
