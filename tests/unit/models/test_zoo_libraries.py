"""Networks of torchvision and timm, and the one-line errors about names and settings."""

import sys

import pytest
import torch
from torch import nn

from paceline.core.errors import RecipeError
from paceline.models.zoo import MODEL_NAMES, build_model
from paceline.recipe.schema.recipe import Model

OURS = ", ".join(MODEL_NAMES)


def test_torchvision_resnet18_reads_grey_images_into_seven_classes():
    model = build_model(Model(name="torchvision:resnet18"), num_classes=7, channels=1)
    logits = model(torch.randn(2, 1, 64, 64))
    assert logits.shape == (2, 7)
    logits.sum().backward()


@pytest.mark.parametrize("name", ["googlenet", "inception_v3"])
def test_inception_networks_have_one_output_even_in_training(name):
    model = build_model(Model(name=f"torchvision:{name}"), num_classes=7, channels=3)
    assert model.training
    assert model(torch.randn(2, 3, 96, 96)).shape == (2, 7)


def test_timm_model_reads_grey_images_into_seven_classes():
    model = build_model(Model(name="timm:test_resnet"), num_classes=7, channels=1)
    logits = model(torch.randn(2, 1, 64, 64))
    assert logits.shape == (2, 7)
    logits.sum().backward()


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("resnet18_cifa", "did you mean 'resnet18_cifar'?"),
        ("wideresnet_course:", "did you mean 'wideresnet_course'?"),
        ("torchvison:resnet18", "did you mean 'torchvision:resnet18'?"),
        ("torchvision:resnet19", "did you mean 'torchvision:resnet18'?"),
        ("timm:mobilenetv3_smal_100", "did you mean 'timm:mobilenetv3_small_100'?"),
        ("qqq", f"use one of {OURS}, torchvision:NAME or timm:NAME"),
        ("torchvision:qqqqqqqqqqqqqqqqqqqqqqqq", f"use one of {OURS}, torchvision:NAME or timm:NAME"),
    ],
)
def test_an_unknown_name_is_one_line_with_the_nearest_name(name, hint):
    assert error_of(Model(name=name)) == f"model.name: {name!r} is not a model ({hint})"


@pytest.mark.parametrize(
    "name", ["fcn_resnet50", "fasterrcnn_resnet50_fpn", "r3d_18", "raft_small", "quantized_resnet18"]
)
def test_torchvision_networks_that_do_not_classify_images_are_unknown(name):
    assert error_of(Model(name=f"torchvision:{name}")).startswith(f"model.name: 'torchvision:{name}' is not a model (")


@pytest.mark.parametrize("name", ["torchvision:resnet18", "timm:resnet18"])
@pytest.mark.parametrize(("field", "value"), [("norm", "group"), ("norm", "none"), ("width", 0.5)])
def test_a_setting_of_our_networks_is_refused_elsewhere(name, field, value):
    message = error_of(Model.model_validate({"name": name, field: value}))
    default = Model.model_fields[field].default
    assert (
        message == f"model.{field}: {value} has no effect on {name} (set model.{field}={default}, or use one of {OURS})"
    )


def test_missing_timm_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    expected = "model.name: timm:resnet18 needs timm (pip install 'paceline[timm]')"
    assert error_of(Model(name="timm:resnet18")) == expected


def test_our_networks_need_neither_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    monkeypatch.setitem(sys.modules, "torchvision", None)
    model = build_model(Model(name="resnet18_cifar", width=0.125), num_classes=2, channels=3)
    assert isinstance(model, nn.Module)


def error_of(section: Model) -> str:
    """Return the message of the `RecipeError` that building `section` raises, having checked it is one line."""
    with pytest.raises(RecipeError) as caught:
        build_model(section, num_classes=3, channels=3)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    return message
