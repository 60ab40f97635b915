"""`paceline.train`: what it is called with becomes a recipe; a whole run of it is in tests/examples."""

import inspect
from pathlib import Path

import pytest

import paceline
import paceline.train.run as engine
from paceline.cli.script import _loaded, _patch
from paceline.core.errors import RecipeError
from paceline.recipe.load import load
from paceline.recipe.schema.source import OwnSource


class Net:
    """A part that stands at the top of a module."""


def recipe_of(recipe, *overrides, model=None, source=None, run_dir=None, resume=False):
    return _loaded(recipe, _patch(overrides, model, source), run_dir, resume=resume)


def test_the_package_and_the_verb_have_one_name() -> None:
    assert callable(paceline.train) and engine.run.__module__ == "paceline.train.run"
    words = inspect.signature(paceline.train).parameters
    assert [*words] == ["recipe", "overrides", "model", "source", "run_dir", "resume"]
    assert "run_dir" in (paceline.train.__call__.__doc__ or "")


def test_a_name_a_mapping_and_a_recipe_are_the_same_recipe() -> None:
    by_name = recipe_of("digits", "seed=3")[1].recipe
    assert recipe_of({"extends": "digits"}, "seed=3")[1].recipe == by_name
    assert recipe_of(load("digits").recipe, "seed=3")[1].recipe == by_name


def test_parts_are_named_by_import_path_and_words_may_give_them_args() -> None:
    recipe = recipe_of("digits", "model.args.depth=3", "data.source.args.x=1", model=Net, source="a.b:Data")[1].recipe
    assert (recipe.model.name, recipe.model.args) == (f"{__name__}:Net", {"depth": 3})
    assert recipe.data.source == OwnSource(name="a.b:Data", args={"x": 1})


def test_what_is_no_recipe_or_names_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"recipe: 3 is no recipe \(give a name"):
        recipe_of(3)
    with pytest.raises(RecipeError, match=r"resume: which run is meant is not said \(name its run_dir\)"):
        recipe_of({"extends": "digits"}, resume=True)
    with pytest.raises(RecipeError, match="model: Net is an object, not a class or function"):
        recipe_of("digits", model=Net())
