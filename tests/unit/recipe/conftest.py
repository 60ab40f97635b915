"""Recipes written for one test, and the one-line refusal a bad one must end in."""

import pytest

from paceline.core.errors import RecipeError
from paceline.recipe.load import LoadedRecipe, Patch, load


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    """Run in an empty folder, so that messages name `r.yaml` and not where a test happens to run."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def write(tmp_path):
    """Return a function that writes a recipe file, by default `r.yaml`, and returns its name."""

    def file(text: str, name: str = "r.yaml") -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return name

    return file


@pytest.fixture
def resolve(write):
    """Return a function that loads the smallest recipe there is with overrides over it."""

    def loaded(*words: str, text: str = "train: {epochs: 1}\n") -> LoadedRecipe:
        return load(write(text), Patch.parse(list(words)))

    return loaded


@pytest.fixture
def refusal():
    """Return a function that calls another, and returns the one-line `RecipeError` it must end in."""

    def message_of(function, *arguments, **options) -> str:
        with pytest.raises(RecipeError) as caught:
            function(*arguments, **options)
        message = str(caught.value)
        assert len(message.splitlines()) == 1
        assert message.isprintable()
        return message

    return message_of
