"""Repeat runs in interleaved order: the same runs again, or whole runs with other seeds."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from paceline.core.results import RunResult
from paceline.lab.measuring import nothing_saved, without_what_is_so
from paceline.lab.runner import Runner
from paceline.lab.trial import Outcome, Trial
from paceline.recipe.patch import Patch
from paceline.recipe.schema import Recipe

T = TypeVar("T")


@dataclass(frozen=True)
class Case:
    """One run of each turn: a patch, on `ranks` ranks over `nodes` nodes (0: this machine).

    With `first_seed`, turn t has the seed first_seed + t - 1; without it, all turns are the same run.
    """

    name: str
    patch: Patch
    ranks: int
    nodes: int = 0
    first_seed: int | None = None

    def trial(self, turn: int) -> Trial:
        """Return the trial of a turn, counted from 1."""
        patch = self.patch
        if self.first_seed is not None:
            patch = Patch((*patch.assignments, ("seed", self.first_seed + turn - 1)))
        return Trial(self.name, patch, ranks=self.ranks, nodes=self.nodes)


def run_turns(of_turn: Callable[[int], Iterable[Trial]], turns: int, runner: Runner) -> Iterator[Outcome]:
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


def there_and_back(items: Sequence[T], turn: int) -> Sequence[T]:
    """Return `things` in the order of a turn, reversed in every other one, so that drift favors none of them."""
    return items if turn % 2 else items[::-1]


def results_of(name: str, outcomes: Sequence[Outcome]) -> dict[int, RunResult]:
    """Return the results of a case by turn, without failed runs."""
    return {
        outcome.repeat: outcome.result
        for outcome in outcomes
        if outcome.trial.name == name and outcome.result is not None
    }


def error_of(name: str, outcomes: Sequence[Outcome]) -> str:
    """Return the error of the first failed run of a case, "" if none failed."""
    return next((each.error for each in outcomes if each.trial.name == name and each.result is None), "")


def runs_of(name: str, outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    """Return the folders of a case's completed runs, relative to the experiment's: `trials/NAME`."""
    paths = [each.rundir.path for each in outcomes if each.trial.name == name and each.result is not None]
    return tuple(path.relative_to(path.parents[1]).as_posix() for path in paths)


def whole_patch(recipe: Recipe, user_patch: Patch) -> Patch:
    """Return the patch for a full run without checkpoints and without early stopping.

    Checkpoint settings of the user (`said`) are kept.
    """
    return without_what_is_so(recipe, [("train.stop", "off"), *nothing_saved(recipe, user_patch)])
