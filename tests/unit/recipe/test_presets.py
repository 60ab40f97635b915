"""Every shipped recipe loads, says what it is, and is the same after a trip through a file."""

import pytest

from paceline.core.rundir import RunDir
from paceline.recipe.load import PRESETS, load, preset_names, preset_summary
from paceline.recipe.schema import Recipe
from paceline.recipe.yamlfile import read_file, read_text, write_text

NAMES = preset_names()


def test_there_are_presets_and_they_are_the_files_of_the_folder():
    files = [path for path in PRESETS.rglob("*") if path.is_file()]
    assert len(NAMES) >= 5
    assert sorted(f"{name}.yaml" for name in NAMES) == sorted(str(path.relative_to(PRESETS)) for path in files)


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_comes_back_from_yaml_as_an_equal_recipe_with_an_equal_hash(name):
    recipe = load(name).recipe
    values = recipe.to_dict()
    read = read_text(write_text(values), "again.yaml").values
    assert read == values
    assert Recipe.model_validate(read) == recipe
    assert Recipe.model_validate(read).hash == recipe.hash


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_loads_again_from_a_run_directory(name, tmp_path):
    recipe = load(name).recipe
    run = RunDir(tmp_path / "run")
    run.create()
    run.recipe.write_text(f"# recipe {recipe.hash}\n" + write_text(recipe.to_dict()), encoding="utf-8")
    again = load(str(run.path))
    assert (again.recipe, again.name) == (recipe, "run")


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_opens_with_a_sentence_that_lists_show(name):
    summary = preset_summary(name)
    assert len(summary) > 20
    assert summary.endswith(".")
    assert not summary.startswith("#")


@pytest.mark.parametrize("name", NAMES)
def test_every_value_of_a_preset_names_the_preset_and_line_that_set_it(name):
    stack = load(name).stack
    assert stack.origins
    for path, place in stack.origins.items():
        file, line = place.rsplit(":", 1)
        assert read_file(PRESETS / file).lines[path] == int(line)


def test_no_name_means_digits():
    assert load().recipe == load("digits").recipe
    assert load().name == "digits"
