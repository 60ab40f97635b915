"""An array runs the given arguments, with the same meaning on another machine."""

import subprocess
import sys
from pathlib import Path

import pytest
import typer

from paceline.cli.submit_jobs import build_array
from paceline.core.errors import RecipeError

WAIT_S = 60
USAGE_ERROR = typer.BadParameter.__mro__[1]
LIST = """
import sys
from paceline.cli.submit_jobs import build_array
print(len(build_array("ladder", ["cpu"], [], 1).tasks), len(build_array("scale", [], ["--nodes", "1,2"], 4).tasks))
print([name for name in ("torch", "torchvision", "timm", "sklearn") if name in sys.modules])
"""


def test_a_ladder_has_a_task_for_each_turn_of_each_rung_on_the_ranks_of_a_node() -> None:
    array = build_array("ladder", ["cpu", "seed=1"], ["--repeats", "2"], 4)
    assert array.args == ("ladder", "cpu", "seed=1", "--repeats", "2", "--ranks", "4")
    assert {task.nodes for task in array.tasks} == {1} and len(array.tasks) % 2 == 0
    assert array.tasks[0].description.endswith(", turn 1 of 2") and array.tasks[0].number == 1


def test_a_study_over_nodes_has_tasks_on_as_many_nodes_as_each_point() -> None:
    array = build_array("scale", ["digits"], ["--nodes", "1,2", "--repeats", "1"], 4)
    assert array.args == ("scale", "digits", "--nodes", "1,2", "--repeats", "1", "--ranks", "1,2,4")
    assert [(task.nodes, task.ranks) for task in array.tasks] == [(1, 1), (1, 2), (1, 4), (2, 8)]


def test_a_study_of_batches_has_a_task_for_each_run_on_all_ranks() -> None:
    array = build_array("scale", [], ["--batch-sizes", "64,128", "--seeds", "3"], 2)
    assert array.args[-2:] == ("--ranks", "2")
    assert [(task.nodes, task.ranks) for task in array.tasks] == [(1, 2)] * 6


def test_given_ranks_are_kept() -> None:
    assert build_array("ladder", ["cpu"], ["--ranks", "2"], 4).args == ("ladder", "cpu", "--ranks", "2")
    array = build_array("scale", ["--ranks", "1,2"], ["--repeats", "1"], 4)
    assert array.args == ("scale", "--ranks", "1,2", "--repeats", "1")
    assert [task.ranks for task in array.tasks] == [1, 2]


@pytest.mark.parametrize(
    ("verb", "options", "message"),
    [
        ("train", [], r"^--array: train has no independent tasks \(it is for ladder and scale\)$"),
        ("ladder", ["--run-dir", "x"], r"^--run-dir: is not an option of an array \(leave it out\)$"),
        ("ladder", ["--task", "1"], "^--task: is not an option of an array"),
        ("ladder", ["--list"], "^--list: is not an option of an array"),
        ("ladder", ["train.epochs=3"], "^train.epochs: 3 has no effect on a ladder"),
        ("scale", ["--run-dir", "x"], "^--run-dir: is not an option of an array"),
        ("scale", ["--collective"], "^--collective: has no tasks"),
        ("scale", ["run", "--predict"], "^--predict RUN: has no tasks"),
        ("scale", ["--at", "8"], "^--at: 8 has no effect in this mode"),
        ("scale", ["--seeds", "8"], "^--seeds: 8 has no effect on short runs"),
    ],
)
def test_a_verb_without_tasks_is_no_array(verb: str, options: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        build_array(verb, [], options, 1)


def test_options_that_the_verb_does_not_have_are_refused_as_by_the_verb() -> None:
    with pytest.raises(USAGE_ERROR, match="No such option: --reapeats"):
        build_array("ladder", ["cpu"], ["--reapeats", "2"], 1)


def test_tasks_are_listed_without_torch(tmp_path: Path) -> None:
    listed = subprocess.run(
        [sys.executable, "-c", LIST], cwd=tmp_path, capture_output=True, text=True, timeout=WAIT_S, check=True
    )
    assert listed.stdout.splitlines()[1:] == ["[]"]
    assert all(int(number) > 3 for number in listed.stdout.splitlines()[0].split())
    assert not list(tmp_path.iterdir())
