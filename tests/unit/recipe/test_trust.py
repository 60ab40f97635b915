"""`recipe.trust`: code that a run names may run where its user says so; their own words need no leave."""

import pytest

from paceline.core.errors import RecipeError
from paceline.recipe.load import load
from paceline.recipe.patch import Patch
from paceline.recipe.schema import Recipe
from paceline.recipe.trust import permitted

NETWORK, SOURCE = "model.name=parts:Net", "data.source={name: 'parts:Set'}"
NEEDED = ("model", "data.source")


def recipe(*words: str) -> Recipe:
    return load("digits", Patch.parse(words)).recipe


@pytest.mark.parametrize(("word", "path", "name"), [(NETWORK, "model", "Net"), (SOURCE, "data.source", "Set")])
def test_code_that_the_run_names_needs_leave_where_it_is_needed(word: str, path: str, name: str) -> None:
    run = recipe(word)
    with pytest.raises(RecipeError) as caught:
        permitted(run, run, NEEDED, own_code=False)
    fix = "(add --own-code where you trust whoever wrote it)"
    assert str(caught.value) == f"{path}.name: parts:{name} is code that the run names {fix}"
    assert [part.path for part in permitted(run, run, NEEDED, own_code=True)] == [path]
    (other,) = set(NEEDED) - {path}
    assert permitted(run, run, (other,), own_code=False) == ()


def test_code_laid_over_the_runs_recipe_is_its_users_own_word() -> None:
    run = recipe(SOURCE)
    (part,) = permitted(recipe("data.source={name: 'mine:Set'}"), run, NEEDED, own_code=False)
    assert part.name == "mine:Set"
    with pytest.raises(RecipeError, match="parts:Set is code that the run names"):
        permitted(recipe(SOURCE, "data.source.args.top=1"), run, NEEDED, own_code=False)
    with pytest.raises(RecipeError, match="parts:Net is code that the run names"):
        permitted(recipe(NETWORK, "data.source={name: 'mine:Set'}"), recipe(NETWORK), NEEDED, own_code=False)
