"""A trial is a variation of a recipe, the command that runs it, and its own folder."""

import sys
from pathlib import Path

import pytest

from paceline.core.errors import RecipeError
from paceline.lab.trial import Trial, apply_patch, build_run_name, build_train_command, format_patch, write_recipe
from paceline.recipe.load import Patch, load


def test_a_patch_and_its_arguments_are_equivalent() -> None:
    patch = Patch(
        (
            ("train.steps", 50),
            ("optim.lr", 1e-05),
            ("data.replay", "host"),
            ("log.samples", False),
            ("data.augment", ["flip", {"name": "cutout", "size": 8}]),
            ("model.weights", "1e5"),  # text that YAML would read as a number
            ("data.source.root", "a b: c"),
        )
    )
    assert Patch.parse(format_patch(patch)) == patch
    assert format_patch(patch)[:4] == ["train.steps=50", "optim.lr=1e-05", "data.replay=host", "log.samples=false"]


def test_a_trial_is_a_training_in_a_fresh_process_of_this_python() -> None:
    trial = Trial("free", Patch((("data.replay", "host"),)))
    assert build_train_command(trial, load("digits").recipe, Path("x/base.yaml"), 3, Path("x/free-1")) == [
        *(sys.executable, "-P", "-m", "paceline", "train", "x/base.yaml", "data.replay=host"),
        *("--ranks", "3", "--run-dir", "x/free-1", "--json"),
    ]
    insisting = build_train_command(
        trial, load("digits").recipe, Path("x/base.yaml"), 3, Path("x/free-1"), ["--oversubscribe"]
    )
    assert insisting[-2:] == ["--oversubscribe", "--json"]


def test_a_trial_of_a_recipe_that_names_code_passes_the_consent_on() -> None:
    named = load("digits", Patch.parse(["model.name=mine:Net"])).recipe
    words = build_train_command(Trial("as-is"), named, Path("x/base.yaml"), 1, Path("x/1"))
    assert words.count("--trust-code") == 1


def test_a_varied_recipe_is_checked_and_reads_back_from_its_file(tmp_path: Path) -> None:
    recipe = load("cifar10-94").recipe
    varied = apply_patch(recipe, Patch((("train.steps", 5), ("schedule.name", "constant"))))
    assert (varied.train.steps, varied.train.epochs, varied.schedule.name) == (5, "auto", "constant")
    write_recipe(varied, tmp_path / "new" / "base.yaml")
    assert load(str(tmp_path / "new" / "base.yaml")).recipe == varied
    with pytest.raises(RecipeError, match=r"^model\.width: "):
        apply_patch(recipe, Patch((("model.width", 0),)))


def test_on_nodes_a_trial_is_a_step_of_the_allocation() -> None:
    trial = Trial("two", nodes=2)
    assert build_train_command(trial, load("digits").recipe, Path("base.yaml"), 8, Path("x")) == [
        *("srun", "--nodes=2", "--ntasks=8", "--ntasks-per-node=4", "--relative=0", "--kill-on-bad-exit=1"),
        *(sys.executable, "-P", "-m", "paceline", "train", "base.yaml", "--ranks", "8", "--run-dir", "x", "--json"),
    ]


def test_no_two_runs_of_an_experiment_share_a_folder() -> None:
    recipe = load("digits").recipe
    faster = Trial("a b/c", Patch((("optim.lr", 0.5),)))
    names = [
        build_run_name(faster, recipe, 1, 1),
        build_run_name(faster, recipe, 1, 2),
        build_run_name(faster, recipe, 2, 1),
        build_run_name(Trial("a b/c"), recipe, 1, 1),
        build_run_name(Trial("a b/c", nodes=1), recipe, 1, 1),
        build_run_name(Trial("d"), recipe, 1, 1),
    ]
    assert len(set(names)) == len(names)
    assert names[0].startswith("a-b-c-") and names[0].endswith("-1r-1")
    assert build_run_name(Trial("../.."), recipe, 1, 1).count(".") == 0
