"""List the parts of an experiment that can run concurrently, each in its own process.

A task of a ladder is one turn of one rung: a run of the rung and one of its baseline, on one node. A task of a scaling
study is one repeat of one point, and of a batch study one run. Tasks are numbered turn by turn, so that every setting
gets a run before any gets two.

Tasks are listed without looking at the machine, as it may be a login node without GPUs. A rung that does not fit is
skipped by its task. Rungs that `auto` finds have no task.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.core.errors import RecipeError
from paceline.core.units import count
from paceline.lab.rungs import Ladder
from paceline.lab.turns import RunCase


@dataclass(frozen=True)
class ArrayTask:
    """One part of an experiment: number from 1, nodes, ranks over all nodes, and a description."""

    number: int
    nodes: int
    ranks: int
    description: str


def list_ladder_tasks(ladder: Ladder, repeats: int, ranks: int) -> tuple[ArrayTask, ...]:
    """Return the tasks of a ladder that runs on `ranks` unless a rung sets its own number."""
    ranks_per_rung = [ladder.rungs[0].ranks or ranks]
    for rung in ladder.rungs[1:]:
        ranks_per_rung.append(rung.ranks or ranks_per_rung[-1])
    max_ranks = [
        max(pair) for pair in zip([ranks_per_rung[0], *ranks_per_rung], ranks_per_rung, strict=False)
    ]  # of a rung and its baseline
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


def locate_task(task: ArrayTask, num_things: int) -> tuple[int, int]:
    """Return the index of a task's rung or case, from 0, out of `num_things`, and its turn, from 1."""
    turn, index = divmod(task.number - 1, num_things)
    return index, turn + 1


def _number_tasks(parts: Iterable[tuple[int, int, str]]) -> tuple[ArrayTask, ...]:
    return tuple(ArrayTask(number, *part) for number, part in enumerate(parts, start=1))
