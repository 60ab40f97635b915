"""`paceline recipes`: which presets it lists, and which recipe it shows."""

import json
from pathlib import Path

import pytest

from paceline.cli.options import RecipesOptions
from paceline.cli.recipes import recipes
from paceline.core.errors import RecipeError
from paceline.recipe.load import preset_names


@pytest.mark.parametrize(
    ("pattern", "belongs"),
    [
        ("cifar*", lambda name: name.startswith("cifar")),
        ("wideresnet", lambda name: "wideresnet" in name),
        ("cifar10-9?", lambda name: name.startswith("cifar10-9")),
    ],
)
def test_a_pattern_or_a_part_of_a_name_lists_the_presets_that_match(capsys, pattern: str, belongs) -> None:
    expected = [name for name in preset_names() if belongs(name)]
    assert 1 < len(expected) < len(preset_names())
    assert recipes(RecipesOptions(args=[pattern], as_json=True)) == 0
    assert list(json.loads(capsys.readouterr().out)) == expected
    recipes(RecipesOptions(args=[pattern]))
    printed = capsys.readouterr().out
    assert [name for name in preset_names() if f"  {name} " in printed] == expected
    headings = [line for line in printed.splitlines() if line.endswith(":")]
    assert len(headings) == len({name.rpartition("/")[0] for name in expected})


def test_the_whole_name_of_a_preset_shows_it_though_others_contain_it(capsys) -> None:
    recipes(RecipesOptions(args=["folder"], as_json=True))
    assert json.loads(capsys.readouterr().out)["recipe"]["data"]["source"]["name"] == "folder"


@pytest.mark.parametrize(("args", "origin"), [(["nothing*"], False), (["cifar*", "seed=1"], False), (["cifar*"], True)])
def test_a_pattern_that_cannot_be_listed_is_refused(args: list[str], origin: bool) -> None:
    with pytest.raises(RecipeError, match=rf"^'{args[0][:-1]}\*': is neither a preset"):
        recipes(RecipesOptions(args=args, origin=origin))


def test_a_folder_whose_name_is_a_part_of_a_preset_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("cifar").mkdir()
    with pytest.raises(RecipeError, match=r"^cifar: is a folder without recipe\.yaml"):
        recipes(RecipesOptions(args=["cifar"]))
