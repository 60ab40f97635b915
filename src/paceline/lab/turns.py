"""Trials that are run in turns: the same runs again, or whole runs of other seeds. What they mean is said elsewhere."""

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
    """What is run in each turn: a patch, on so many ranks, over so many nodes (0: here).

    With a `first_seed`, turn t has the seed first_seed + t - 1; without one, all turns are the same run.
    """

    name: str
    patch: Patch
    ranks: int
    nodes: int = 0
    first_seed: int | None = None

    def trial(self, turn: int) -> Trial:
        """Return what is run in a turn, counted from 1."""
        patch = self.patch
        if self.first_seed is not None:
            patch = Patch((*patch.assignments, ("seed", self.first_seed + turn - 1)))
        return Trial(self.name, patch, ranks=self.ranks, nodes=self.nodes)


def run_turns(of_turn: Callable[[int], Iterable[Trial]], turns: int, runner: Runner) -> Iterator[Outcome]:
    """Run the trials `of_turn` 1 to `turns`, turn by turn; yield how each run has ended, its turn as `repeat`.

    In turns (A B C A B C) a machine that grows slower, or warmer, is so for all of them. A trial that has failed is not
    run again, as it would fail again; one of another seed is another trial, and may do better.
    """
    failed: list[Trial] = []
    for turn in range(1, turns + 1):
        for trial in of_turn(turn):
            if trial not in failed:
                outcome = runner.run(trial, turn)
                if outcome.result is None:
                    failed.append(trial)
                yield outcome


def there_and_back(things: Sequence[T], turn: int) -> Sequence[T]:
    """Return things in the order of a turn: every other one goes backwards, so that a drift favours none of them."""
    return things if turn % 2 else things[::-1]


def results_of(name: str, outcomes: Sequence[Outcome]) -> dict[int, RunResult]:
    """Return the results of a case by turn, those of failed runs left out."""
    return {
        outcome.repeat: outcome.result
        for outcome in outcomes
        if outcome.trial.name == name and outcome.result is not None
    }


def error_of(name: str, outcomes: Sequence[Outcome]) -> str:
    """Return why the first run of a case that failed did so, "" where none has."""
    return next((each.error for each in outcomes if each.trial.name == name and each.result is None), "")


def runs_of(name: str, outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    """Return the folders of a case's runs that have ended well, as seen from the experiment's: `trials/NAME`."""
    paths = [each.rundir.path for each in outcomes if each.trial.name == name and each.result is not None]
    return tuple(path.relative_to(path.parents[1]).as_posix() for path in paths)


def whole_patch(recipe: Recipe, said: Patch) -> Patch:
    """Return what makes of `recipe` a run to the end that saves nothing: no target ends it, no checkpoint slows it.

    What a user has `said` of saving stands.
    """
    return without_what_is_so(recipe, [("train.stop", "off"), *nothing_saved(recipe, said)])
