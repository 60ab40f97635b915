"""An array runs the given arguments, with the same meaning on another machine."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import typer

from paceline.cli.cv import cv
from paceline.cli.submit_jobs import JobShape, SubmitRequest, list_tasks, parse_submit_args, prepare_job
from paceline.core.errors import RecipeError
from paceline.recipe.load import Patch, load
from paceline.recipe.yaml import to_yaml_text

WAIT_S = 60
USAGE_ERROR = typer.BadParameter.__mro__[1]
LIST = """
import sys
from paceline.cli.submit_jobs import SubmitRequest, list_tasks
requests = SubmitRequest("ladder", ("cpu",)), SubmitRequest("scale", (), ("--nodes", "1,2", "--ranks", "1,2,4"))
print(*(len(list_tasks(each)) for each in requests))
print([name for name in ("torch", "torchvision", "timm", "sklearn") if name in sys.modules])
"""


def prepared(verb: str, *args: str, ranks: int) -> SubmitRequest:
    """Return the request of a job array on one node of that many ranks."""
    request = parse_submit_args([verb, *args])
    return prepare_job(request, JobShape(1, ranks, 0), None, "off", array=True).request


def test_a_ladder_has_a_task_for_each_turn_of_each_rung_on_the_ranks_of_a_node() -> None:
    request = prepared("ladder", "cpu", "seed=1", "--repeats", "2", ranks=4)
    assert request.options == ("--repeats", "2", "--ranks", "4")
    tasks = list_tasks(request)
    assert {task.nodes for task in tasks} == {1} and len(tasks) % 2 == 0
    assert tasks[0].description.endswith(", repeat 1 of 2") and tasks[0].number == 1


def test_a_study_over_nodes_has_tasks_on_as_many_nodes_as_each_point() -> None:
    request = prepared("scale", "digits", "--nodes", "1,2", "--repeats", "1", ranks=4)
    assert request.options == ("--nodes", "1,2", "--repeats", "1", "--ranks", "1,2,4")
    assert [(task.nodes, task.ranks) for task in list_tasks(request)] == [(1, 1), (1, 2), (1, 4), (2, 8)]


def test_a_study_of_batches_has_a_task_for_each_run_on_all_ranks() -> None:
    request = prepared("batch-study", "--batch-sizes", "64,128", "--seeds", "3", ranks=2)
    assert request.options[-2:] == ("--ranks", "2")
    assert [(task.nodes, task.ranks) for task in list_tasks(request)] == [(1, 2)] * 6


def test_a_cross_validation_has_a_task_for_each_run_of_the_folds_that_are_named() -> None:
    request = prepared("cv", "digits", "--folds", "3", "--repeats", "2", "--only", "0,2", ranks=1)
    numbers = [task.number for task in list_tasks(request)]
    assert numbers == [1, 3, 4, 6]
    with pytest.raises(RecipeError, match=r"^--only: 0,2 leaves out task 5, fold 1"):
        cv(replace(request.parse(), task=5))
    with pytest.raises(RecipeError, match=r"^--only: '3' is not one of 3 folds"):
        list_tasks(prepared("cv", "digits", "--folds", "3", "--only", "3", ranks=1))


def test_given_ranks_are_kept_but_auto_is_replaced() -> None:
    """`auto` would count the GPUs of the machine that submits."""
    assert prepared("ladder", "cpu", "--ranks", "2", ranks=4).options == ("--ranks", "2")
    assert prepared("ladder", "cpu", "--ranks", "auto", ranks=4).options == ("--ranks", "auto", "--ranks", "4")
    request = prepared("scale", "--ranks", "1,2", "--repeats", "1", ranks=4)
    assert request.options == ("--ranks", "1,2", "--repeats", "1")
    assert [task.ranks for task in list_tasks(request)] == [1, 2]


@pytest.mark.parametrize("stage", ["off", "/dev/shm"])
def test_a_frozen_recipe_has_the_preprocessing_of_its_weights(tmp_path: Path, stage: str) -> None:
    """The job takes all fields of a frozen recipe as set."""
    path = tmp_path / "mine.yaml"
    path.write_text("extends: folder\nmodel: {name: timm:vit_small_patch16_384, weights: default}\n")
    for verb in ("train", "profile"):
        request = parse_submit_args([verb, str(path)])
        job = prepare_job(request, JobShape(1, 1, 0), None, stage, array=False)
        assert job.is_frozen
        assert (job.recipe.data.mean, job.recipe.data.interpolation) == ((0.5, 0.5, 0.5), "bicubic")


def test_a_job_that_resumes_a_run_needs_neither_its_weights_nor_their_description(tmp_path: Path) -> None:
    path, run = tmp_path / "mine.yaml", tmp_path / "run"
    path.write_text("extends: folder\nmodel: {name: timm:resnet18, weights: 'hf-hub:nobody/there'}\n")
    recipe = load(str(path), Patch.parse(["data.mean=[0.5, 0.5, 0.5]"])).recipe
    run.mkdir()
    (run / "recipe.yaml").write_text(to_yaml_text(recipe.to_dict()))
    (run / "plan.json").write_text('{"world_size": 1}')
    job = prepare_job(parse_submit_args([str(path)]), JobShape(1, 1, 0), run, "off", array=False)
    assert job.recipe == recipe


@pytest.mark.parametrize(
    ("verb", "options", "message"),
    [
        ("train", [], r"^--array: train has no independent tasks \(it is for ladder, scale, batch-study and cv\)$"),
        ("ladder", ["--list"], r"^--list: is not an option of ladder in a job \(leave it out"),
        ("ladder", ["train.epochs=3"], "^train.epochs: 3 has no effect on a ladder"),
        ("scale", ["--seeds", "8"], "^--seeds: 8 has no effect on short runs"),
    ],
)
def test_a_verb_without_tasks_is_no_array(verb: str, options: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        list_tasks(prepared(verb, *options, ranks=1))


def test_options_that_the_verb_does_not_have_are_refused_as_by_the_verb() -> None:
    with pytest.raises(USAGE_ERROR, match="No such option: --reapeats"):
        prepared("ladder", "cpu", "--reapeats", "2", ranks=1)


def test_tasks_are_listed_without_torch(tmp_path: Path) -> None:
    listed = subprocess.run(
        [sys.executable, "-c", LIST], cwd=tmp_path, capture_output=True, text=True, timeout=WAIT_S, check=True
    )
    assert listed.stdout.splitlines()[1:] == ["[]"]
    assert all(int(number) > 3 for number in listed.stdout.splitlines()[0].split())
    assert not list(tmp_path.iterdir())
