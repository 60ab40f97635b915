"""Choose the target accuracy of a comparison, and find when each run reached it. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from paceline.core.errors import RecipeError
from paceline.core.goal import AccuracyTarget
from paceline.report.compare.read import ComparedRun, EvalPoint
from paceline.report.compare.result import TargetOrigin

# Margin of near-chance accuracy, as a share of chance or of 1 - chance if that is less. The accuracy of a model that
# predicts one class varies within it.
_NEAR_CHANCE_SHARE: Final = 0.2
# A run whose best accuracy is below this share of the overall best sets no target for the others.
MIN_BEST_SHARE: Final = 0.5


@dataclass(frozen=True)
class AccuracyTarget:
    """A target accuracy, None if no run was evaluated or none has learned, and its origin.

    `untrained_runs` are the runs ignored because they have not learned. `patience` is the number of evaluations in a row that
    must reach the target, for all runs.
    """

    level: float | None
    origin: TargetOrigin
    untrained_runs: tuple[ComparedRun, ...] = ()
    patience: int = 1

    def find_first_reached(self, run: ComparedRun) -> EvalPoint | None:
        """Return the evaluation with which a run reached the target, the last of `patience` in a row, or None."""
        if self.level is None:
            return None
        index = AccuracyTarget(self.level, self.patience).met_at(each.accuracy for each in run.evals)
        return None if index is None else run.evals[index]


def choose_target(runs: Sequence[ComparedRun], metric: str, requested: float | None) -> AccuracyTarget:
    """Return the target accuracy.

    Use `requested` if given, else the lowest target at which a recipe stops (`train.stop.top1`), else the lowest of the
    best accuracies of all runs that learned, which is the highest that all of these reach.

    Raise `RecipeError` if `requested` is not in (0, 1].
    """
    if requested is not None:
        if not 0 < requested <= 1:
            raise RecipeError(f"--target: {requested:g} is not an accuracy (write a number from 0 to 1, such as 0.75)")
        return AccuracyTarget(requested, "asked")
    if metric == "top1":
        stops = [(stop, run) for run in runs if (stop := stop_accuracy(run)) is not None]
        if stops:
            # The lowest patience: a run stops at its own level, so every run that reached that has reached this one.
            patience = min(stop_patience(run) for _, run in stops)
            return AccuracyTarget(min(stop for stop, _ in stops), "recipes", patience=patience)
    bests = [(run, best) for run in runs if (best := best_accuracy(run)) is not None]
    if not bests:
        return AccuracyTarget(None, "nothing")
    # Runs near chance, or far below the best, would set a target that measures nothing.
    least = MIN_BEST_SHARE * max(best for _, best in bests)
    is_level = [best >= least and best > near_chance_accuracy(run, metric) for run, best in bests]
    levels = [best for (_, best), has_learned in zip(bests, is_level, strict=True) if has_learned]
    unlearnt = tuple(run for (run, _), has_learned in zip(bests, is_level, strict=True) if not has_learned)
    if not levels:
        return AccuracyTarget(None, "chance", unlearnt)
    return AccuracyTarget(min(levels), "lowest_learnt" if unlearnt else "lowest_best", unlearnt)


def near_chance_accuracy(run: ComparedRun, metric: str) -> float:
    """Return the accuracy up to which a run has learned nothing: for ten classes 12 %, a fifth above chance.

    Return 0 if the number of classes is unknown.
    """
    chance = chance_accuracy(run, metric)
    return chance + _NEAR_CHANCE_SHARE * min(chance, 1 - chance)


def chance_accuracy(run: ComparedRun, metric: str) -> float:
    """Return the chance accuracy for the run's classes, 0 if their number is unknown."""
    classes = run.plan.get("num_classes")
    if not isinstance(classes, int) or classes < 1:
        return 0.0
    return min(1.0, (5 if metric == "top5" else 1) / classes)


def best_accuracy(run: ComparedRun) -> float | None:
    """Return the highest accuracy, None without evaluations."""
    return max((each.accuracy for each in run.evals), default=None)


def stop_accuracy(run: ComparedRun) -> float | None:
    """Return the accuracy at which the run's recipe stops, None if it does not."""
    try:
        stop = float(run.settings.get("train.stop.top1", ""))
    except ValueError:
        return None
    return stop if 0 < stop <= 1 else None


def stop_patience(run: ComparedRun) -> int:
    """Return the recipe's `train.stop.patience`, 1 if it is absent or invalid."""
    patience = run.settings.get("train.stop.patience", "")
    return max(1, int(patience)) if patience.isdecimal() and len(patience) < 10 else 1
