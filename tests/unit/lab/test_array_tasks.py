"""Tasks of an experiment are listed without looking at the machine, and give the results of the whole experiment."""

import pytest

from paceline.core.errors import RecipeError
from paceline.lab.ladder_file import Ladder, Rung, list_ladders, load_ladder
from paceline.lab.repeat import ArrayTask, find_task, list_ladder_tasks, list_study_tasks
from paceline.lab.trial import Trial


def ladder_of(*rungs: Rung) -> Ladder:
    return Ladder(name="own", recipe="digits", rungs=rungs)


def test_each_turn_of_each_rung_is_a_task_on_one_node_those_of_a_turn_together() -> None:
    found = list_ladder_tasks(ladder_of(Rung(name="base"), Rung(name="bf16")), 2, 4)
    assert found == (
        ArrayTask(1, 1, 4, "base, repeat 1 of 2", 0, 1),
        ArrayTask(2, 1, 4, "bf16, repeat 1 of 2", 1, 1),
        ArrayTask(3, 1, 4, "base, repeat 2 of 2", 0, 2),
        ArrayTask(4, 1, 4, "bf16, repeat 2 of 2", 1, 2),
    )


def test_a_rung_that_this_machine_cannot_show_is_listed_all_the_same() -> None:
    rungs = [Rung(name="base"), Rung(name="gpu", on="cuda"), Rung(name="cpu", on="cpu"), Rung(name="many", ranks=4096)]
    assert [task.description.partition(",")[0] for task in list_ladder_tasks(ladder_of(*rungs), 1, 1)] == [
        *("base", "gpu", "cpu", "many")
    ]


def test_the_rungs_of_every_shipped_ladder_are_listed() -> None:
    ladders = [load_ladder(name) for name in list_ladders()]
    assert len(ladders) > 3
    for ladder in ladders:
        assert len(list_ladder_tasks(ladder, ladder.repeats, 2)) == len(ladder.rungs) * ladder.repeats


def test_a_task_has_room_for_both_runs_of_its_pair() -> None:
    rungs = (Rung(name="base", ranks=2), Rung(name="four", ranks=4), Rung(name="one", ranks=1), Rung(name="last"))
    assert [task.ranks for task in list_ladder_tasks(ladder_of(*rungs), 1, 8)] == [2, 4, 4, 1]


def test_each_repeat_of_each_point_is_a_task_on_its_nodes() -> None:
    cases = [Trial("1 rank", ranks=1), Trial("8 ranks on 2 nodes", ranks=8, nodes=2)]
    assert list_study_tasks(cases, 2) == (
        ArrayTask(1, 1, 1, "1 rank, repeat 1 of 2", 0, 1),
        ArrayTask(2, 2, 8, "8 ranks on 2 nodes, repeat 1 of 2", 1, 1),
        ArrayTask(3, 1, 1, "1 rank, repeat 2 of 2", 0, 2),
        ArrayTask(4, 2, 8, "8 ranks on 2 nodes, repeat 2 of 2", 1, 2),
    )


def test_a_number_leads_back_to_what_it_is_of() -> None:
    cases = [Trial(name, ranks=1) for name in "abc"]
    tasks = list_study_tasks(cases, 2)
    found = [find_task(tasks, number) for number in range(1, 7)]
    assert [(task.index, task.turn) for task in found] == [*((0, 1), (1, 1), (2, 1), (0, 2), (1, 2), (2, 2))]


@pytest.mark.parametrize("number", [0, 7, -1])
def test_a_number_that_no_task_has_is_refused(number: int) -> None:
    tasks = list_study_tasks([Trial(name, ranks=1) for name in "abc"], 2)
    with pytest.raises(RecipeError, match=rf"^--task: {number} is not one of the 6 tasks \(write 1 to 6\)$"):
        find_task(tasks, number)
