"""`merge_layers` in `recipe.load`: the later layer wins, a new variant resets its section, values have origins."""

import copy

import pytest

from paceline.recipe.load import Layer, merge_layers


def merged(*mappings) -> dict:
    return merge_layers(Layer(values, f"layer {number}") for number, values in enumerate(mappings)).values


def test_the_later_layer_wins_field_by_field():
    first = {"seed": 1, "data": {"batch_size": 8, "workers": 2}}
    assert merged(first, {"data": {"batch_size": 16}}) == {"seed": 1, "data": {"batch_size": 16, "workers": 2}}


def test_a_list_replaces_the_list_before_it():
    assert merged({"data": {"augment": ["flip", "rotate"]}}, {"data": {"augment": ["affine"]}}) == {
        "data": {"augment": ["affine"]}
    }


def test_a_section_replaces_a_value_and_a_value_a_section():
    stop = {"train": {"stop": {"top1": 0.9}}}
    off = {"train": {"stop": "off"}}
    assert merged(stop, off) == off
    assert merged(off, stop) == stop


def test_a_mapping_that_is_one_value_is_replaced_and_arguments_are_merged():
    before = {"train": {"class_weights": {"cat": 2}}, "model": {"args": {"a": 1}}}
    change = {"train": {"class_weights": {"dog": 3}}, "model": {"args": {"b": 2}}}
    assert merged(before, change) == {**change, "model": {"args": {"a": 1, "b": 2}}}
    assert merged(before, {"train": {"class_weights": "off"}}, change) == merged(before, change)
    stack = merge_layers([Layer(before, "r.yaml", {"train.class_weights": 3}), Layer(change, "command line")])
    assert stack.origin("train.class_weights.dog") == "command line"


def test_no_layer_makes_no_recipe():
    assert merged() == {}


def test_merging_changes_no_layer():
    layers = [
        {"optim": {"name": "sgd", "lr": 1}, "train": {"epochs": 2}},
        {"optim": {"name": "adam"}, "train": {"steps": 3}},
    ]
    before = copy.deepcopy(layers)
    merged(*layers)
    assert layers == before


@pytest.mark.parametrize(
    ("before", "change", "after"),
    [
        (
            {"optim": {"name": "sgd", "lr": 1, "momentum": 0.5}},
            {"optim": {"name": "adam", "eps": 1e-6}},
            {"optim": {"name": "adam", "eps": 1e-6}},
        ),
        (
            {"optim": {"name": "sgd", "lr": 1}},
            {"optim": {"eps": 1e-6, "lr": 2, "name": "adam"}},
            {"optim": {"eps": 1e-6, "lr": 2, "name": "adam"}},
        ),
        (
            {"schedule": {"name": "cosine", "warmup": "5ep", "final": 0.1}},
            {"schedule": {"name": "step", "milestones": ["50%"]}},
            {"schedule": {"name": "step", "milestones": ["50%"]}},
        ),
        (
            {"data": {"batch_size": 8, "source": {"name": "folder", "root": "a"}}},
            {"data": {"source": {"root": "b", "name": "cifar10"}}},
            {"data": {"batch_size": 8, "source": {"root": "b", "name": "cifar10"}}},
        ),
    ],
    ids=["name first", "name last", "schedule", "source"],
)
def test_another_name_resets_the_section_and_keeps_the_settings_of_its_layer(before, change, after):
    assert merged(before, change) == after


def test_a_name_that_is_already_chosen_resets_nothing():
    before = {"optim": {"name": "adam", "eps": 1e-6}}
    assert merged(before, {"optim": {"name": "adam", "lr": 1}}) == {"optim": {"name": "adam", "eps": 1e-6, "lr": 1}}


@pytest.mark.parametrize(("section", "default"), [("optim", "sgd"), ("schedule", "constant"), ("source", "digits")])
def test_fields_without_a_name_belong_to_the_default_variant(section, default):
    def put(values):
        return {"data": {"source": values}} if section == "source" else {section: values}

    assert merged(put({"x": 1})) == put({"x": 1, "name": default})
    assert merged(put({"x": 1}), put({"name": default})) == put({"x": 1, "name": default})
    assert merged(put({"x": 1}), put({"name": "other"})) == put({"name": "other"})


def test_choosing_a_variant_on_the_command_line_may_come_after_its_fields(resolve):
    first = resolve("optim.name=adam", "optim.eps=1e-6").recipe
    last = resolve("optim.eps=1e-6", "optim.name=adam").recipe
    assert first == last
    assert (first.optim.name, first.optim.eps, first.optim.lr) == ("adam", 1e-6, 1e-3)


def test_a_new_variant_has_its_own_defaults(resolve):
    recipe = resolve("optim.name=adamw", text="train: {epochs: 1}\noptim: {lr: 5.0, momentum: 0.5}\n").recipe
    assert (recipe.optim.lr, recipe.optim.weight_decay) == (1e-3, 0.01)


@pytest.mark.parametrize(
    ("before", "change", "after"),
    [
        ({"epochs": 10}, {"steps": 5}, {"steps": 5}),
        ({"steps": 5}, {"epochs": 10}, {"epochs": 10}),
        ({"epochs": 10}, {"epochs": 3}, {"epochs": 3}),
        ({"epochs": 10}, {"steps": "auto"}, {"epochs": 10, "steps": "auto"}),
        ({"epochs": 10, "precision": "bf16"}, {"steps": 5}, {"precision": "bf16", "steps": 5}),
        ({"epochs": 10}, {"epochs": 3, "steps": 5}, {"epochs": 3, "steps": 5}),
        ({}, {"epochs": 3, "steps": 5}, {"epochs": 3, "steps": 5}),
    ],
)
def test_of_epochs_and_steps_the_later_layer_replaces_the_other(before, change, after):
    assert merged({"train": before}, {"train": change}) == {"train": after}


def test_epochs_and_steps_in_one_layer_are_an_error(resolve, refusal):
    once = "train: the length must be given exactly once (set either epochs or steps)"
    assert refusal(resolve, "train.epochs=3", "train.steps=5") == once
    assert refusal(resolve, text="train: {epochs: 3, steps: 5}\n") == once
    assert refusal(resolve, text="train: {precision: fp32}\n") == once


def test_the_one_that_was_replaced_is_auto(resolve):
    train = resolve("train.steps=5").recipe.train
    assert (train.epochs, train.steps) == ("auto", 5)


def test_origins_name_the_last_layer_and_its_line():
    stack = merge_layers(
        [
            Layer(
                {"seed": 1, "optim": {"lr": 1, "momentum": 0.5}}, "base.yaml", {"seed": 1, "optim": 2, "optim.lr": 3}
            ),
            Layer({"optim": {"lr": 2}}, "command line"),
        ]
    )
    assert stack.origins == {"seed": "base.yaml:1", "optim.lr": "command line", "optim.momentum": "base.yaml"}
    assert stack.origin("optim.lr") == "command line"
    assert stack.origin("optim.nesterov") == "default"
    assert stack.origin("") == "default"


def test_what_was_dropped_has_no_origin_any_more():
    stack = merge_layers(
        [
            Layer({"optim": {"name": "sgd", "momentum": 0.5}, "train": {"epochs": 1, "stop": {"top1": 0.9}}}, "base"),
            Layer({"optim": {"name": "adam"}, "train": {"steps": 1, "stop": "off"}}, "over"),
        ]
    )
    assert stack.origins == {"optim.name": "over", "train.steps": "over", "train.stop": "over"}
