"""Parsing the arguments of a command."""

from pathlib import Path

import pytest

from paceline.cli.args import count_ranks, split_recipe_args
from paceline.core.errors import RecipeError, WorldError


def test_the_recipe_comes_first_and_is_optional() -> None:
    assert split_recipe_args([])[0] == "digits"
    assert split_recipe_args(["optim.lr=1"])[0] == "digits"
    name, patch = split_recipe_args(["my.yaml", "optim.lr=1e-2", "data.source.root=/a=b"])
    assert name == "my.yaml"
    assert patch.assignments == (("optim.lr", 0.01), ("data.source.root", "/a=b"))


def test_a_second_recipe_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"^'other': is not an override"):
        split_recipe_args(["digits", "other"])
    with pytest.raises(RecipeError, match="the recipe comes first"):
        split_recipe_args(["optim.lr=1", "digits"])


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5", "", "²"])
def test_a_number_of_ranks_is_a_number(text: str) -> None:
    with pytest.raises(WorldError, match=r"^--ranks: "):
        count_ranks(text, {})


def test_auto_is_one_rank_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert count_ranks("auto", {"CUDA_VISIBLE_DEVICES": ""}) == 1
    assert count_ranks("3", {}) == 3
    monkeypatch.setattr("paceline.cli.args.count_gpus", lambda environ: 4)
    assert count_ranks("auto", {}) == 4


def test_presets_are_no_files_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "digits").mkdir()
    monkeypatch.chdir(tmp_path)
    assert split_recipe_args(["digits"])[0] == "digits"
