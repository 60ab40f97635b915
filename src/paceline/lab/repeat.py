"""Repeat runs in interleaved order, in one process or as the tasks of a job array."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from paceline.core.errors import RecipeError
from paceline.core.results import RunResult
from paceline.core.units import count
from paceline.lab.ladder_file import Ladder
from paceline.lab.patches import disable_checkpoints, drop_unchanged_settings
from paceline.lab.runner import TrialRunner
from paceline.lab.trial import Trial, TrialOutcome
from paceline.recipe.load import Patch
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
    list_trials: Callable[[int], Iterable[Trial]], turns: int, runner: TrialRunner
) -> Iterator[TrialOutcome]:
    """Run the trials that `list_trials` returns for turns 1 to `turns`; `repeat` of an outcome is the turn."""
    # Interleaving (A B C A B C) spreads drift of the machine over all trials. A trial that failed would fail again and
    # is skipped; another seed makes it another trial.
    failed: list[Trial] = []
    for turn in range(1, turns + 1):
        for trial in list_trials(turn):
            if trial not in failed:
                outcome = runner.run(trial, turn)
                if outcome.result is None:
                    failed.append(trial)
                yield outcome


def alternate_order(items: Sequence[T], turn: int) -> Sequence[T]:
    """Return `items`, reversed in every other turn, so that drift favors none of them."""
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
    """Return the patch for a full run without early stopping, and without checkpoints unless `user_patch` sets them."""
    return drop_unchanged_settings(recipe, [("train.stop", "off"), *disable_checkpoints(recipe, user_patch)])


@dataclass(frozen=True)
class ArrayTask:
    """One part of an experiment: number from 1, nodes, ranks over all nodes, and a description.

    Of a ladder: one turn of one rung with its baseline. Of a scaling study: one repeat of one point; of a batch study:
    one run.
    """

    number: int
    nodes: int
    ranks: int
    description: str


def list_ladder_tasks(ladder: Ladder, repeats: int, ranks: int) -> tuple[ArrayTask, ...]:
    """Return the tasks of a ladder; `ranks` is the number for rungs that set none."""
    # Tasks are listed without looking at the machine, as it may be a login node without GPUs. A rung that does not fit
    # is skipped by its task; rungs that `auto` proposes have none.
    ranks_per_rung = [ladder.rungs[0].ranks or ranks]
    for rung in ladder.rungs[1:]:
        ranks_per_rung.append(rung.ranks or ranks_per_rung[-1])
    # A task runs a rung and its baseline, the rung below.
    max_ranks = [max(pair) for pair in zip([ranks_per_rung[0], *ranks_per_rung], ranks_per_rung, strict=False)]
    return _number_tasks(
        (1, num_ranks, f"{rung.name}, turn {turn} of {repeats}")
        for turn in range(1, repeats + 1)
        for rung, num_ranks in zip(ladder.rungs, max_ranks, strict=True)
    )


def list_study_tasks(cases: Sequence[RunCase], turns: int) -> tuple[ArrayTask, ...]:
    """Return the tasks of a scaling or batch study."""
    return _number_tasks(
        (max(1, case.nodes), case.ranks, f"{case.name}, turn {turn} of {turns}")
        for turn in range(1, turns + 1)
        for case in cases
    )


def find_task(tasks: Sequence[ArrayTask], number: int) -> ArrayTask:
    """Return the task with that number. Raise `RecipeError` if there is none."""
    if not 1 <= number <= len(tasks):
        raise RecipeError(f"--task: {number} is not one of the {count(len(tasks), 'task')} (write 1 to {len(tasks)})")
    return tasks[number - 1]


def locate_task(task: ArrayTask, num_items: int) -> tuple[int, int]:
    """Return the index of a task's rung or case, from 0, out of `num_items`, and its turn, from 1."""
    # Tasks are numbered turn by turn, as `_number_tasks` gets them.
    turn, index = divmod(task.number - 1, num_items)
    return index, turn + 1


# Turn by turn, so that every setting gets a run before any gets two.
def _number_tasks(rows: Iterable[tuple[int, int, str]]) -> tuple[ArrayTask, ...]:
    return tuple(ArrayTask(number, *row) for number, row in enumerate(rows, start=1))
