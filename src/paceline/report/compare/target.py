"""Which accuracy runs are to reach, and what it took each of them. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.core.errors import RecipeError
from paceline.core.goal import Goal
from paceline.report.compare.read import Judged, Trained

From = Literal["asked", "recipes", "lowest_best", "nothing"]


@dataclass(frozen=True)
class Target:
    """An accuracy to reach, None where no run was evaluated, and where it is from."""

    level: float | None
    origin: From

    def first_met(self, run: Trained) -> Judged | None:
        """Return the evaluation with which a run has met it, None where none does.

        Where it is the recipes' own that is the last of as many in a row as the run's recipe asks for before it stops
        (`train.stop.patience`), so that the time is the one that the run itself has told; else the first.
        """
        if self.level is None:
            return None
        patience = _patience(run) if self.origin == "recipes" else 1
        place = Goal(self.level, patience).met_at(each.accuracy for each in run.evals)
        return None if place is None else run.evals[place]


def choose_target(runs: Sequence[Trained], metric: str, asked: float | None) -> Target:
    """Return the accuracy to reach.

    It is the one that was asked for, or the lowest at which recipes stop (`train.stop.top1`), or the lowest of the
    runs' best accuracies, which is the highest that all of them reach. Raise `RecipeError` for what is no accuracy.
    """
    if asked is not None:
        if not 0 < asked <= 1:
            raise RecipeError(f"--target: {asked:g} is no accuracy (write a share of 1, such as 0.75)")
        return Target(asked, "asked")
    if metric == "top1":
        stops = [stop for stop in map(_stop, runs) if stop is not None]
        if stops:
            return Target(min(stops), "recipes")
    bests = [best for best in map(best_of, runs) if best is not None]
    return Target(min(bests), "lowest_best") if bests else Target(None, "nothing")


def best_of(run: Trained) -> float | None:
    """Return the highest accuracy, None where there was no evaluation."""
    return max((each.accuracy for each in run.evals), default=None)


def _stop(run: Trained) -> float | None:
    try:
        stop = float(run.settings.get("train.stop.top1", ""))
    except ValueError:
        return None
    return stop if 0 < stop <= 1 else None


def _patience(run: Trained) -> int:
    """Return how many evaluations in a row a run's recipe asks for; 1 where it does not say, or no number."""
    patience = run.settings.get("train.stop.patience", "")
    return max(1, int(patience)) if patience.isdecimal() and len(patience) < 10 else 1
