"""Which accuracy runs are to reach, and what it took each of them. Pure."""

from collections.abc import Sequence
from typing import Literal

from paceline.core.errors import RecipeError
from paceline.report.compare.read import Judged, Trained

From = Literal["asked", "recipes", "lowest_best", "nothing"]


def choose_target(runs: Sequence[Trained], metric: str, asked: float | None) -> tuple[float | None, From]:
    """Return the accuracy to reach, and where it is from; None where no run was evaluated.

    It is the one that was asked for, or the lowest at which recipes stop (`train.stop.top1`), or the lowest of the
    runs' best accuracies, which is the highest that all of them reach. Raise `RecipeError` for what is no accuracy.
    """
    if asked is not None:
        if not 0 < asked <= 1:
            raise RecipeError(f"--target: {asked:g} is no accuracy (write a share of 1, such as 0.75)")
        return asked, "asked"
    if metric == "top1":
        stops = [stop for stop in map(_stop, runs) if stop is not None]
        if stops:
            return min(stops), "recipes"
    bests = [best for best in map(best_of, runs) if best is not None]
    return (min(bests), "lowest_best") if bests else (None, "nothing")


def first_to_meet(run: Trained, target: float | None) -> Judged | None:
    """Return the first evaluation that meets the target, None where none does."""
    return None if target is None else next((each for each in run.evals if each.accuracy >= target), None)


def best_of(run: Trained) -> float | None:
    """Return the highest accuracy, None where there was no evaluation."""
    return max((each.accuracy for each in run.evals), default=None)


def _stop(run: Trained) -> float | None:
    try:
        stop = float(run.settings.get("train.stop.top1", ""))
    except ValueError:
        return None
    return stop if 0 < stop <= 1 else None
