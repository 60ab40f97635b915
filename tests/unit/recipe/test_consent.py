"""Code that a file names needs consent; what the command line or a script names needs none."""

from pathlib import Path

import pytest

from paceline.core.errors import RecipeError
from paceline.recipe.consent import (
    consent_arguments,
    require_consent,
    require_consent_to_settings,
    settings_have_plugins,
)
from paceline.recipe.load import Patch, load, load_any, load_values

NAMES = """\
model: {name: "leaving:Net"}
data:
  source: {name: "leaving:Data"}
  sampler: {name: "leaving:Sampler"}
  augment: [flip, "leaving:Change"]
optim: {name: "leaving:Optim", lr: 0.1}
log: {sinks: ["leaving:Sink"]}
train: {epochs: 1}
"""
ALL = {
    "model.name": "leaving:Net",
    "data.source.name": "leaving:Data",
    "data.sampler.name": "leaving:Sampler",
    "data.augment[1].name": "leaving:Change",
    "optim.name": "leaving:Optim",
    "log.sinks[0].name": "leaving:Sink",
}


@pytest.fixture(autouse=True)
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_text(NAMES)


def arguments_without(field: str) -> list[str]:
    """Return overrides that replace all code of `r.yaml` but that of a field."""
    others = {
        "model.name": "resnet18_cifar",
        "data.source.name": "digits",
        "data.sampler.name": "shuffle",
        "data.augment[1].name": "[]",
        "optim.name": "sgd",
        "log.sinks[0].name": "[]",
    }
    return [f"{each.partition('[')[0]}={value}" for each, value in others.items() if each != field]


@pytest.mark.parametrize("field", ALL)
def test_each_field_that_names_code_in_a_file_is_refused_with_place_value_and_fix(field: str) -> None:
    loaded = load("r.yaml", Patch.parse(arguments_without(field)))
    with pytest.raises(RecipeError) as caught:
        require_consent(loaded, trust_code=False)
    message = str(caught.value)
    assert message.startswith("r.yaml:") and f"{field}: {ALL[field]} is custom code" in message
    assert "(add --trust-code, in Python trust_code=True, if you trust its author)" in message
    require_consent(loaded, trust_code=True)
    assert consent_arguments(loaded.recipe) == ("--trust-code",)


def test_a_file_that_is_extended_is_the_one_that_is_named() -> None:
    Path("above.yaml").write_text("extends: r.yaml\noptim: {name: 'mine:Optim', lr: 0.1}\n")
    with pytest.raises(RecipeError, match=r"^r.yaml:1: model.name: leaving:Net is custom code"):
        require_consent(load("above.yaml"), trust_code=False)
    with pytest.raises(RecipeError, match=r"^r.yaml:1: model.name: leaving:Net is custom code"):
        require_consent(load_values({"extends": "above.yaml"}), trust_code=False)
    words = [word for word in arguments_without("optim.name") if not word.startswith("optim")]
    with pytest.raises(RecipeError, match=r"^above.yaml:2: optim.name: mine:Optim is custom code"):
        require_consent(load("above.yaml", Patch.parse(words)), trust_code=False)


def test_code_named_on_the_command_line_or_by_a_script_needs_no_consent() -> None:
    for loaded in (
        load("digits"),
        load("digits", Patch.parse(["model.name=leaving:Net", "log.sinks=['leaving:Sink']"])),
        load("r.yaml", Patch.parse([*arguments_without("model.name"), "model.name=leaving:Net"])),
        load_values({"extends": "digits", "model": {"name": "leaving:Net"}}),
        load_any(load_values({"extends": "digits", "model": {"name": "leaving:Net"}}).recipe),
    ):
        require_consent(loaded, trust_code=False)
    with pytest.raises(RecipeError, match="leaving:Net"):
        require_consent(load("r.yaml", Patch.parse(["model.args.top=1"])), trust_code=False)


def test_only_the_plugins_that_are_imported_count() -> None:
    loaded = load("r.yaml", Patch.parse(["data.source.name=digits", "data.sampler=shuffle", "data.augment=[]"]))
    require_consent(loaded, trust_code=False, paths=("data.",))
    with pytest.raises(RecipeError, match=r"model\.name"):
        require_consent(loaded, trust_code=False, paths=("model", "data.source"))


def test_settings_of_a_ladder_are_looked_at_whether_or_not_they_fit_a_recipe() -> None:
    for settings, field in (
        ({"model": {"name": "a:B", "nonsense": 1}}, "model.name"),
        ({"data": {"source": {"name": "a:B"}}}, "data.source.name"),
        ({"data": {"augment": ["flip", "a:B"]}}, "data.augment[1].name"),
        ({"data": {"sampler": "a:B"}}, "data.sampler.name"),
        ({"log": {"sinks": [{"name": "a:B"}]}}, "log.sinks[0].name"),
        ({"optim": {"name": "a:B"}}, "optim.name"),
    ):
        assert settings_have_plugins(settings)
        with pytest.raises(RecipeError) as caught:
            require_consent_to_settings(settings, "l.yaml: rung 'x'", trust_code=False)
        assert str(caught.value).startswith(f"l.yaml: rung 'x': {field}: a:B is custom code")
        require_consent_to_settings(settings, "l.yaml", trust_code=True)
    for plain in ({}, {"model": 3}, {"model": {"name": "timm:resnet18"}}, {"data": {"augment": "flip"}}):
        assert not settings_have_plugins(plain)
