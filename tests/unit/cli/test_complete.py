"""Candidates for the last word of a command line."""

from pathlib import Path

import pytest
import typer
from pydantic import ValidationError

from paceline.cli.app import app
from paceline.cli.complete import SHELLS, complete, completion_script
from paceline.core.errors import RecipeError
from paceline.lab.ladder_file import list_ladders
from paceline.recipe.errors import choices
from paceline.recipe.load import load, preset_names
from paceline.recipe.schema import Recipe

PROGRAM = typer.main.get_command(app)


def found(*words: str) -> list[str]:
    return complete(words, PROGRAM)


@pytest.fixture(autouse=True)
def in_a_folder_with_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("runs/digits-1/recipe.yaml", "runs/digits-1/plan.json", "runs/notes/todo.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)


def test_the_first_word_is_a_verb() -> None:
    assert {"train", "eval", "data", "report"} <= set(found(""))
    assert found("tra") == ["train"]


def test_a_group_of_verbs_has_verbs_behind_it() -> None:
    assert found("data", "in") == ["inspect"]


def test_no_argument_is_like_an_empty_one() -> None:
    assert found() == found("")


def test_nothing_follows_an_unknown_verb() -> None:
    assert found("tarin", "") == []


def test_a_recipe_or_a_run_comes_first() -> None:
    words = found("train", "")
    assert set(preset_names()) < set(words) and "runs/digits-1" in words
    assert "runs/notes" not in words
    assert found("train", "dig") == ["digits"]
    assert found("train", "digits", "dig") == []


def test_a_run_with_a_newline_in_its_name_is_omitted() -> None:
    for name in ("a b", "two\nlines", "a\x1b[2J"):
        Path("runs", name).mkdir()
        Path("runs", name, "recipe.yaml").touch()
        Path("runs", name, "plan.json").touch()
    assert found("report", "runs/") == ["runs/a b", "runs/digits-1"]


def test_options_and_their_values_are_no_arguments() -> None:
    assert found("train", "--ranks", "2", "dig") == ["digits"]
    assert found("train", "--resume", "dig") == ["digits"]


def test_a_ladder_has_ladders_and_the_fields_of_its_recipe() -> None:
    assert set(list_ladders()) < set(found("ladder", ""))
    assert found("ladder", "cpu", "data.batch_s") == ["data.batch_size="]


def test_runs_complete_run_arguments() -> None:
    assert found("report", "") == ["runs/digits-1"]
    assert found("compare", "runs/digits-1", "") == ["runs/digits-1"]


def test_files_are_completed_by_the_shell() -> None:
    assert found("predict", "runs/digits-1", "") == []


def test_submit_takes_a_verb_before_the_recipe() -> None:
    assert found("submit", "lad") == ["ladder"]
    assert found("submit", "train", "dig") == ["digits"]
    assert found("submit", "train", "la") == []


def test_fields_come_by_section_and_then_whole() -> None:
    assert {"optim.", "data.", "seed="} <= set(found("train", "digits", ""))
    assert {"optim.lr=", "optim.lr_scaling="} <= set(found("train", "digits", "optim.l"))
    assert found("train", "digits", "optim.mom") == ["optim.momentum="]


def test_a_field_is_followed_by_its_values() -> None:
    assert "optim.name=lars" in found("train", "optim.name=")
    assert found("train", "optim.name=sg") == ["optim.name=sgd"]
    assert found("train", "optim.lr=") == []


def test_every_completed_value_of_a_field_is_valid() -> None:
    """In the sections without variants: in others, what a field takes depends on which of them it is."""
    plain = ("train", "parallel", "checkpoint", "measure")
    values, tried = load("digits").recipe.to_dict(), 0
    for section, field, word in ((*path.split(".", 1), word) for path, words in choices().items() for word in words):
        if section in plain:
            given = {**values, section: {**values[section], field: word}}
            try:
                Recipe.model_validate(given)
            except ValidationError as error:  # it has no effect beside the others, say
                assert "literal_error" not in {each["type"] for each in error.errors()}, (section, field, word)
            tried += 1
    assert tried > 20


def test_options_are_those_of_the_verb() -> None:
    assert found("train", "--dr") == ["--dry-run"]
    assert found("tune", "--dr") == []
    assert {"--probes", "--no-probes", "--help"} <= set(found("profile", "--"))


def test_an_option_is_followed_by_its_values() -> None:
    assert found("export", "runs/digits-1", "--format", "") == ["onnx", "torch", "safetensors", "state_dict"]
    assert found("train", "--ranks", "") == ["auto"]
    assert found("train", "--run-dir", "") == []


@pytest.mark.parametrize("shell", SHELLS)
def test_each_shell_has_a_script(shell: str) -> None:
    assert f"paceline --show-completion {shell}" in completion_script(shell)
    assert "--complete" in completion_script(shell)


def test_another_shell_is_refused_in_a_line() -> None:
    with pytest.raises(
        RecipeError, match=r"--show-completion: 'tcsh' is not a supported shell \(use bash, fish, zsh\)"
    ):
        completion_script("tcsh")
