"""An accuracy that is to be met, and when it is: the one rule of `train.stop`, of studies and of reports. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class AccuracyTarget:
    """A level of accuracy, and how many evaluations in a row have to reach it."""

    level: float
    patience: int = 1

    def count(self, hits: int, accuracy: float) -> int:
        """Return how many evaluations in a row have reached the level, with one of `accuracy` after `hits` of them."""
        return hits + 1 if accuracy >= self.level else 0

    def is_met(self, hits: int) -> bool:
        """Return whether so many evaluations in a row are enough."""
        return hits >= self.patience

    def met_at(self, accuracies: Iterable[float]) -> int | None:
        """Return the place, from 0, of the evaluation with which it was met first; None where it never was."""
        hits = 0
        for place, accuracy in enumerate(accuracies):
            hits = self.count(hits, accuracy)
            if self.is_met(hits):
                return place
        return None
