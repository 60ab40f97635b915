"""Repeat runs in interleaved order: the same runs again, or whole runs with other seeds."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from paceline.core.results import RunResult
from paceline.lab.measuring import disable_checkpoints, drop_unchanged_settings
from paceline.lab.runner import TrialRunner
from paceline.lab.trial import Trial, TrialOutcome
from paceline.recipe.patch import Patch
from paceline.recipe.schema import Recipe

T = TypeVar("T")


@dataclass(frozen=True)
class RunCase:
    """One run of each turn: a patch, on `ranks` ranks over `nodes` nodes (0: this machine).

    With `first_seed`, turn t has the seed first_seed + t - 1; without it, all turns are the same run.
    """

    name: str
    patch: Patch
    ranks: int
    nodes: int = 0
    first_seed: int | None = None

    def build_trial(self, turn: int) -> Trial:
        """Return the trial of a turn, counted from 1."""
        patch = self.patch
        if self.first_seed is not None:
            patch = Patch((*patch.assignments, ("seed", self.first_seed + turn - 1)))
        return Trial(self.name, patch, ranks=self.ranks, nodes=self.nodes)


def run_interleaved(
    of_turn: Callable[[int], Iterable[Trial]], turns: int, runner: TrialRunner
) -> Iterator[TrialOutcome]:
    """Run the trials `of_turn` 1 to `turns`, turn by turn; yield each outcome, with the turn as `repeat`."""
    # Interleaving (A B C A B C) spreads drift of the machine over all trials. A trial that failed would fail again and
    # is skipped; another seed makes it another trial.
    failed: list[Trial] = []
    for turn in range(1, turns + 1):
        for trial in of_turn(turn):
            if trial not in failed:
                outcome = runner.run(trial, turn)
                if outcome.result is None:
                    failed.append(trial)
                yield outcome


def alternate_order(items: Sequence[T], turn: int) -> Sequence[T]:
    """Return `things` in the order of a turn, reversed in every other one, so that drift favors none of them."""
    return items if turn % 2 else items[::-1]


def results_by_repeat(name: str, outcomes: Sequence[TrialOutcome]) -> dict[int, RunResult]:
    """Return the results of a case by turn, without failed runs."""
    return {
        outcome.repeat: outcome.result
        for outcome in outcomes
        if outcome.trial.name == name and outcome.result is not None
    }


def find_first_error(name: str, outcomes: Sequence[TrialOutcome]) -> str:
    """Return the error of the first failed run of a case, "" if none failed."""
    return next((each.error for each in outcomes if each.trial.name == name and each.result is None), "")


def list_completed_folders(name: str, outcomes: Sequence[TrialOutcome]) -> tuple[str, ...]:
    """Return the folders of a case's completed runs, relative to the experiment's: `trials/NAME`."""
    paths = [each.rundir.path for each in outcomes if each.trial.name == name and each.result is not None]
    return tuple(path.relative_to(path.parents[1]).as_posix() for path in paths)


def build_full_run_patch(recipe: Recipe, user_patch: Patch) -> Patch:
    """Return the patch for a full run without checkpoints and without early stopping.

    Checkpoint settings of the user (`said`) are kept.
    """
    return drop_unchanged_settings(recipe, [("train.stop", "off"), *disable_checkpoints(recipe, user_patch)])
