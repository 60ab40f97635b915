"""The parts of an experiment that can be run at the same time, each by a process of its own: which there are.

A ladder's part is one turn of one rung: a run of it and one of the rung below, in the order of that turn and on one
node, so that what is compared ran in one place. A scaling study's is one repeat of one point, a study of batches' one
run. They are numbered turn by turn, so that the first ones to run give each setting a run before any has two.

They are listed on another machine than they run on, such as a login node without GPUs. So nothing here looks at the
machine: all rungs of a ladder are listed, and the task of one that does not fit says so where it runs, and is done. The
rungs that a ladder looks for by itself are nobody's task.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.core.errors import RecipeError
from paceline.core.units import count
from paceline.lab.rungs import Ladder
from paceline.lab.turns import Case


@dataclass(frozen=True)
class Task:
    """A part of an experiment: its number, from 1, the nodes it takes, its ranks over all of them, and what it is."""

    number: int
    nodes: int
    ranks: int
    what: str


def ladder_tasks(ladder: Ladder, repeats: int, ranks: int) -> tuple[Task, ...]:
    """Return the tasks of a ladder that is climbed on `ranks` where no rung says on how many."""
    on = [ladder.rungs[0].ranks or ranks]
    for rung in ladder.rungs[1:]:
        on.append(rung.ranks or on[-1])
    most = [max(pair) for pair in zip([on[0], *on], on, strict=False)]  # of a rung and the one below
    return _numbered(
        (1, num_ranks, f"{rung.name}, turn {turn} of {repeats}")
        for turn in range(1, repeats + 1)
        for rung, num_ranks in zip(ladder.rungs, most, strict=True)
    )


def study_tasks(cases: Sequence[Case], turns: int) -> tuple[Task, ...]:
    """Return the tasks of a scaling study, or of a study of batches."""
    return _numbered(
        (max(1, case.nodes), case.ranks, f"{case.name}, turn {turn} of {turns}")
        for turn in range(1, turns + 1)
        for case in cases
    )


def find_task(tasks: Sequence[Task], number: int) -> Task:
    """Return the task of that number. Raise `RecipeError` where there is none."""
    if not 1 <= number <= len(tasks):
        raise RecipeError(f"--task: {number} is none of the {count(len(tasks), 'task')} (write 1 to {len(tasks)})")
    return tasks[number - 1]


def place_of(task: Task, num_things: int) -> tuple[int, int]:
    """Return which rung or case a task is of, from 0, of so many, and in which turn, from 1."""
    turn, index = divmod(task.number - 1, num_things)
    return index, turn + 1


def _numbered(parts: Iterable[tuple[int, int, str]]) -> tuple[Task, ...]:
    return tuple(Task(number, *part) for number, part in enumerate(parts, start=1))
