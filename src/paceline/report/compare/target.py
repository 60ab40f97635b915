"""Which accuracy runs are to reach, and what it took each of them. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from paceline.core.errors import RecipeError
from paceline.core.goal import Goal
from paceline.report.compare.read import Judged, Trained
from paceline.report.compare.result import From

_NEAR: Final = 0.2
"""Of the accuracy of guessing, or of what is wrong in that where this is less, by which a run may lie above it and have
learnt nothing: a network that calls all images alike scatters about it."""
LEAST_SHARE: Final = 0.5
"""Of the best accuracy of all runs, below which a run's best is no level to hold the others to."""


@dataclass(frozen=True)
class Target:
    """An accuracy to reach, None where no run was evaluated or none has learnt, and where it is from.

    `unlearnt` are the runs that it does not go by, as they have not learnt. `patience` is how many evaluations in a row
    have to reach it, the same number for all runs.
    """

    level: float | None
    origin: From
    unlearnt: tuple[Trained, ...] = ()
    patience: int = 1

    def first_met(self, run: Trained) -> Judged | None:
        """Return the evaluation with which a run has met it, the last of as many in a row as it takes; None without."""
        if self.level is None:
            return None
        place = Goal(self.level, self.patience).met_at(each.accuracy for each in run.evals)
        return None if place is None else run.evals[place]


def choose_target(runs: Sequence[Trained], metric: str, asked: float | None) -> Target:
    """Return the accuracy to reach.

    It is the one that was asked for, or the lowest at which recipes stop (`train.stop.top1`), or the lowest of the
    runs' best accuracies, which is the highest that all of them reach. The last goes by runs that have learnt: those
    whose best is near chance, or less than half of the best of all, would make a race of who is bad first.

    A level of the recipes' takes as many evaluations in a row as the recipe with the least `train.stop.patience` asks
    for: a run that has stopped goes no further, so every one that has met its own level has met this one too. Raise
    `RecipeError` for what is no accuracy.
    """
    if asked is not None:
        if not 0 < asked <= 1:
            raise RecipeError(f"--target: {asked:g} is no accuracy (write a share of 1, such as 0.75)")
        return Target(asked, "asked")
    if metric == "top1":
        stops = [(stop, run) for run in runs if (stop := stop_of(run)) is not None]
        if stops:
            patience = min(patience_of(run) for _, run in stops)
            return Target(min(stop for stop, _ in stops), "recipes", patience=patience)
    bests = [(run, best) for run in runs if (best := best_of(run)) is not None]
    if not bests:
        return Target(None, "nothing")
    least = LEAST_SHARE * max(best for _, best in bests)
    is_level = [best >= least and best > near_chance(run, metric) for run, best in bests]
    levels = [best for (_, best), has_learnt in zip(bests, is_level, strict=True) if has_learnt]
    unlearnt = tuple(run for (run, _), has_learnt in zip(bests, is_level, strict=True) if not has_learnt)
    if not levels:
        return Target(None, "chance", unlearnt)
    return Target(min(levels), "lowest_learnt" if unlearnt else "lowest_best", unlearnt)


def near_chance(run: Trained, metric: str) -> float:
    """Return the accuracy up to which a run has learnt nothing: a fifth above that of guessing, 12 % of ten classes.

    0 where it is not known how many classes there are.
    """
    chance = chance_of(run, metric)
    return chance + _NEAR * min(chance, 1 - chance)


def chance_of(run: Trained, metric: str) -> float:
    """Return the accuracy of guessing among the run's classes, 0 where it is not known how many they are."""
    classes = run.plan.get("num_classes")
    if not isinstance(classes, int) or classes < 1:
        return 0.0
    return min(1.0, (5 if metric == "top5" else 1) / classes)


def best_of(run: Trained) -> float | None:
    """Return the highest accuracy, None where there was no evaluation."""
    return max((each.accuracy for each in run.evals), default=None)


def stop_of(run: Trained) -> float | None:
    """Return the accuracy at which a run's recipe stops, None where it does not."""
    try:
        stop = float(run.settings.get("train.stop.top1", ""))
    except ValueError:
        return None
    return stop if 0 < stop <= 1 else None


def patience_of(run: Trained) -> int:
    """Return how many evaluations in a row a run's recipe asks for; 1 where it does not say, or no number."""
    patience = run.settings.get("train.stop.patience", "")
    return max(1, int(patience)) if patience.isdecimal() and len(patience) < 10 else 1
