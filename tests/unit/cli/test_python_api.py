"""`paceline.train`: what it is called with becomes a recipe; a whole run of it is in tests/examples."""

import inspect
from pathlib import Path

import pytest

import paceline
from paceline.cli.python_api import _build_patch, _load_recipe, translate_option_names
from paceline.core.errors import PeerLostError, RecipeError
from paceline.recipe.load import load
from paceline.recipe.schema.source import OwnSource
from paceline.recipe.yaml import to_yaml_text


class Net:
    """A part that stands at the top of a module."""


def recipe_of(recipe, *overrides, model=None, source=None, run_dir=None, resume=False):
    return _load_recipe(recipe, _build_patch(overrides, model, source), run_dir, resume=resume)


def test_train_is_the_verb_and_documents_its_arguments() -> None:
    assert callable(paceline.train)
    words = inspect.signature(paceline.train).parameters
    assert [*words] == ["recipe", "overrides", "model", "source", "run_dir", "ranks", "resume", "trust_code"]
    assert "run_dir" in (paceline.train.__doc__ or "")


def test_a_name_a_mapping_and_a_recipe_are_the_same_recipe() -> None:
    by_name = recipe_of("digits", "seed=3")[1].recipe
    assert recipe_of({"extends": "digits"}, "seed=3")[1].recipe == by_name
    assert recipe_of(load("digits").recipe, "seed=3")[1].recipe == by_name


def test_plugins_are_named_by_import_path_and_take_args_from_overrides() -> None:
    recipe = recipe_of("digits", "model.args.depth=3", "data.source.args.x=1", model=Net, source="a.b:Data")[1].recipe
    assert (recipe.model.name, recipe.model.args) == (f"{__name__}:Net", {"depth": 3})
    assert recipe.data.source == OwnSource(name="a.b:Data", args={"x": 1})


def test_an_invalid_recipe_or_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"recipe: 3 is not a recipe \(give a name"):
        recipe_of(3)
    with pytest.raises(RecipeError, match=r"resume: needs the run to resume \(give its run_dir\)"):
        recipe_of({"extends": "digits"}, resume=True)
    with pytest.raises(RecipeError, match="model: Net is an object, not a class or function"):
        recipe_of("digits", model=Net())
    with pytest.raises(
        RecipeError, match=r'^overrides: \{\'optim\.lr\': 3\} is not a string \(write "KEY=VALUE", such'
    ):
        recipe_of("digits", {"optim.lr": 3})


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        ("--run-dir: a is (add --resume, or name another)", "run_dir: a is (add resume=True, or name another)"),
        ("--resume: a was started with x", "resume: a was started with x"),
        ("--resume: none (write paceline train RUN --resume)", "resume: none (give the run in place of the recipe)"),
        ("a--resume/b-of--run-dir: is no folder", "a--resume/b-of--run-dir: is no folder"),
    ],
)
def test_errors_name_arguments_and_not_options(printed: str, expected: str) -> None:
    error = PeerLostError(printed, is_explained=True)
    with pytest.raises(PeerLostError) as caught, translate_option_names():
        raise error
    assert caught.value is error and error.is_explained and str(error) == expected


def test_an_error_about_an_existing_run_names_arguments_of_python(tmp_path: Path) -> None:
    (tmp_path / "plan.json").touch()
    (tmp_path / "recipe.yaml").write_text(to_yaml_text(load("digits").recipe.to_dict()))
    with pytest.raises(RecipeError, match=rf"^run_dir: {tmp_path} already holds a run \(add resume=True, or name"):
        paceline.train("digits", run_dir=tmp_path)


@pytest.mark.parametrize("override", ["data.batch_size=auto", "train.accumulate=auto"])
def test_a_batch_to_be_measured_starts_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, override: str) -> None:
    started: list[int] = []
    monkeypatch.setattr(
        "paceline.cli.python_ranks.train_on_ranks", lambda ranks, *args, **options: started.append(ranks)
    )
    paceline.train("digits", override, run_dir=tmp_path / "run", ranks=2)
    assert started == [2]
