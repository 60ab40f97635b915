"""`Patch` in `recipe.load`: KEY=VALUE words as one nested mapping."""

import pytest

from paceline.recipe.load import Patch
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.train import REPLACED_WHOLE


def values(*words: str) -> dict:
    return Patch.parse(list(words)).values()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3), ("5.0e-4", 5e-4), ("1e3", 1000.0), ("3", 3), ("-3", -3), ("0x1F", 31), ("012", 12),
        ("true", True), ("false", False), ("", None), ("null", None), ("~", None),
        ("on", "on"), ("off", "off"), ("yes", "yes"), ("auto", "auto"), ("5ep", "5ep"), ("30%", "30%"),
        ("'3'", "3"), ("~/photos", "~/photos"), ("a=b", "a=b"), ("==", "=="), ("a b", "a b"),
        ("/data/a=b/~c", "/data/a=b/~c"), ("timm:resnet18", "timm:resnet18"), ("été", "été"),
        ("[flip]", ["flip"]), ("[]", []), ("[1e-3, x]", [1e-3, "x"]),
        ("[flip, {name: pad_crop, padding: 2}]", ["flip", {"name": "pad_crop", "padding": 2}]),
        ("{top1: 0.9}", {"top1": 0.9}), ("{}", {}),
    ],
)  # fmt: skip
def test_a_value_is_yaml(text, value):
    read = values(f"key={text}")["key"]
    assert read == value
    assert type(read) is type(value)


def test_dots_make_sections():
    assert values("optim.lr=1", "optim.name=adam", "seed=2", "data.source.name=folder") == {
        "optim": {"lr": 1, "name": "adam"},
        "seed": 2,
        "data": {"source": {"name": "folder"}},
    }


def test_of_two_assignments_to_one_path_the_later_wins():
    assert values("seed=1", "seed=2") == {"seed": 2}


@pytest.mark.parametrize("words", [("optim.lr=1", "optim={name: adam}"), ("optim={name: adam}", "optim.lr=1")])
def test_a_mapping_and_a_field_of_it_are_merged(words):
    assert values(*words) == {"optim": {"lr": 1, "name": "adam"}}


@pytest.mark.parametrize("before", ["{cat: 2}", "off", "balanced"])
@pytest.mark.parametrize("last", ["train.class_weights={dog: 3}", "train={class_weights: {dog: 3}}"])
def test_a_mapping_that_is_one_value_replaces_what_was_before_it(before, last):
    words = ("train.epochs=2", f"train.class_weights={before}", last)
    assert values(*words) == {"train": {"epochs": 2, "class_weights": {"dog": 3}}}
    assert values("model.args={a: 1}", "model.args={b: 2}") == {"model": {"args": {"a": 1, "b": 2}}}


def test_a_mapping_that_is_one_value_is_not_shared_with_the_patch():
    patch = Patch.parse(["train.class_weights={dog: 3}"])
    patch.values()["train"]["class_weights"]["cat"] = 2
    assert patch.values() == {"train": {"class_weights": {"dog": 3}}}


def test_a_mapping_that_is_one_value_has_no_fields(refusal):
    assert refusal(values, "train.class_weights={cat: 2}", "train.class_weights.dog=3") == (
        "train.class_weights.dog: train.class_weights is one value, not a section (write train.class_weights={dog: 3})"
    )


def test_all_fields_whose_keys_are_data_are_one_value():
    sections = Recipe.model_json_schema()["$defs"]
    places = {"Train": "train", "Weighted": "data.sampler"}
    found = {
        f"{places[title]}.{name}"
        for title, section in sections.items()
        for name, field in section.get("properties", {}).items()
        if any(isinstance(each.get("additionalProperties"), dict) for each in (field, *field.get("anyOf", [])))
    }
    assert found == REPLACED_WHOLE


def test_a_switch_may_be_thrown_after_its_fields_were_set():
    assert values("train.stop.top1=0.9", "train.stop=off") == {"train": {"stop": "off"}}


def test_no_overrides_make_an_empty_patch():
    assert values() == {}
    assert Patch.parse([]) == Patch()


def test_a_patch_is_a_value_that_using_it_does_not_change():
    words = ["optim={name: adam}", "optim.lr=1", "data.augment=[{name: flip}]"]
    patch = Patch.parse(words)
    first = patch.values()
    first["optim"]["extra"] = 1
    assert patch == Patch.parse(words)
    assert patch.values() == values(*words)


@pytest.mark.parametrize(
    "word",
    ["", "seed", "=3", "Seed=3", "a..b=3", ".a=3", "a.=3", "a b=3", "a-b=3", "--a=3", "1x=3", "a[0]=3", "ü=3"],
)
def test_a_word_that_is_not_an_assignment_is_refused(refusal, word):
    assert refusal(Patch.parse, [word]) == f"{word!r}: is not an override (write KEY=VALUE, such as optim.lr=0.4)"


def test_a_field_of_what_was_just_set_to_a_value_is_refused(refusal):
    assert refusal(values, "optim=x", "optim.lr=3") == (
        "optim.lr: optim was just set to 'x', so it has no fields (drop one)"
    )
    assert refusal(values, "data.source=x", "data.source.root.deep=3") == (
        "data.source.root.deep: source was just set to 'x', so it has no fields (drop one)"
    )


PLAIN = "not allowed in a recipe (write a plain value)"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("*x", f"optim.lr:1: anchors and aliases are {PLAIN}"),
        ("!!float 3", f"optim.lr:1: tag tag:yaml.org,2002:float is {PLAIN}"),
        ("[1", "optim.lr:1:3: expected ',' or ']', but got '<stream end>' (fix the YAML)"),
        ("{a: 1, a: 2}", 'optim.lr:1:8: found duplicate key "a" with value "2" (original value: "1") (fix the YAML)'),
        ("{1: 2}", 'optim.lr:1: key 1 is not a word (write it in quotes: "1")'),
        ("\x07", "optim.lr:1: '\\x07' is not allowed in YAML (remove it)"),
        ("\udcff", "optim.lr:1: '\\udcff' is not allowed in YAML (remove it)"),
        (
            "2026-11-21",
            "optim.lr: datetime.date(2026, 11, 21) is a date, which recipes do not support (write a number or text)",
        ),
    ],
)
def test_a_value_that_is_no_plain_yaml_is_refused_naming_the_field(refusal, text, message):
    assert refusal(Patch.parse, [f"optim.lr={text}"]) == message
