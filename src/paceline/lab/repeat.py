"""Repeat runs in interleaved order, in one process or as the tasks of a job array."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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


@dataclass(frozen=True)
class TrialRuns:
    """Runs of a trial: results by turn, `folders` of completed runs, and `error` of the first failed one, or ""."""

    results: Mapping[int, RunResult]
    folders: tuple[str, ...]
    error: str


def collect_runs(name: str, outcomes: Sequence[TrialOutcome]) -> TrialRuns:
    """Return the runs of the trial `name` among those of an experiment."""
    runs = [outcome for outcome in outcomes if outcome.trial.name == name]
    return TrialRuns(
        results={each.repeat: each.result for each in runs if each.result is not None},
        folders=tuple(each.folder for each in runs if each.result is not None),
        error=next((each.error for each in runs if each.result is None), ""),
    )


def build_full_run_patch(recipe: Recipe, user_patch: Patch) -> Patch:
    """Return the patch for a full run without early stopping, and without checkpoints unless `user_patch` sets them."""
    return drop_unchanged_settings(recipe, [("train.stop", "off"), *disable_checkpoints(recipe.checkpoint, user_patch)])


@dataclass(frozen=True)
class ArrayTask:
    """One part of an experiment: number from 1, nodes, ranks over all nodes, and a description.

    Of a ladder: one turn of one rung with its baseline. Of a scaling study: one repeat of one point; of a batch study:
    one run. `index` is that of the rung, point or run, from 0, and `turn` counts from 1.
    """

    number: int
    nodes: int
    ranks: int
    description: str
    index: int
    turn: int


def list_ladder_tasks(ladder: Ladder, repeats: int, ranks: int) -> tuple[ArrayTask, ...]:
    """Return the tasks of a ladder; `ranks` is the number for rungs that set none."""
    # Tasks are listed without looking at the machine, as it may be a login node without GPUs. A rung that does not fit
    # is skipped by its task; rungs that `auto` proposes have none.
    items, below = [], ladder.rungs[0].ranks or ranks
    for rung in ladder.rungs:
        num_ranks = rung.ranks or below
        # A task runs a rung and its baseline, the rung below.
        items.append((rung.name, 1, max(below, num_ranks)))
        below = num_ranks
    return _list_tasks(items, repeats)


def list_study_tasks(cases: Sequence[Trial], turns: int) -> tuple[ArrayTask, ...]:
    """Return the tasks of a scaling or batch study."""
    return _list_tasks([(case.name, max(1, case.nodes), case.ranks or 1) for case in cases], turns)


def _list_tasks(items: Sequence[tuple[str, int, int]], turns: int) -> tuple[ArrayTask, ...]:
    # Turn by turn, so that every setting gets a run before any gets two.
    in_order = itertools.product(range(1, turns + 1), enumerate(items))
    return tuple(
        ArrayTask(number, nodes, ranks, f"{name}, repeat {turn} of {turns}", index, turn)
        for number, (turn, (index, (name, nodes, ranks))) in enumerate(in_order, start=1)
    )


def find_task(tasks: Sequence[ArrayTask], number: int) -> ArrayTask:
    """Return the task with that number. Raise `RecipeError` if there is none."""
    if not 1 <= number <= len(tasks):
        raise RecipeError(f"--task: {number} is not one of the {count(len(tasks), 'task')} (write 1 to {len(tasks)})")
    return tasks[number - 1]
