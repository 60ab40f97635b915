"""`log.sinks`: names or sections, each once, and errors that say what there is."""

import pytest

from paceline.core.errors import RecipeError
from paceline.recipe.load import Patch, load
from paceline.recipe.schema.train import Log, Mlflow, OwnSink, Trackio, Wandb


def sinks(value: str) -> tuple[object, ...]:
    return load("digits", Patch.parse([f"log.sinks={value}"])).recipe.log.sinks


def test_no_sink_is_the_default() -> None:
    assert Log().sinks == ()


def test_a_name_is_a_section_with_its_defaults() -> None:
    assert sinks("[wandb, {name: mlflow}, trackio]") == (Wandb(), Mlflow(), Trackio())


def test_options_and_parts_of_ones_own_stand_in_the_same_list() -> None:
    named = sinks('[{name: wandb, project: p, mode: offline}, {name: "a.b:C", args: {x: 1}}]')
    assert named == (Wandb(project="p", mode="offline"), OwnSink(name="a.b:C", args={"x": 1}))


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("[wanb]", "log.sinks[0]: 'wanb' is not one of wandb, mlflow, trackio"),
        (
            "[mlflow, {name: wandb, projekt: p}]",
            "log.sinks[1].projekt: no such field (did you mean 'log.sinks[1].project'?)",
        ),
        ("[wandb, mlflow, wandb]", "log.sinks: wandb is named twice (name it once)"),
        ("[{name: mlflow, experiment: a/b}]", "log.sinks[0].experiment: 'a/b' is not a name: "),
        ("wandb", "log.sinks: 'wandb' should be a list"),
    ],
)
def test_an_invalid_sink_is_refused_with_its_path(value: str, says: str) -> None:
    with pytest.raises(RecipeError) as error:
        sinks(value)
    assert str(error.value).startswith(says)
