"""Models of torchvision and timm, and the one-line errors about names and settings."""

import sys

import pytest
import torch
from timm.layers import DropPath
from torch import nn
from torchvision.ops import StochasticDepth

from paceline.core.errors import RecipeError
from paceline.models.build import MODEL_NAMES, build_model
from paceline.recipe.schema.base import IMPORT_PATH_FORM
from paceline.recipe.schema.model import Model

OURS = ", ".join(MODEL_NAMES)
RESIDUAL = ", ".join(name for name in MODEL_NAMES if name.startswith("resnet"))


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
        ("resnet18", "did you mean 'torchvision:resnet18'?"),
        ("ViT_B_16", "did you mean 'torchvision:vit_b_16'?"),
        ("mobilenetv3_small_100", "did you mean 'timm:mobilenetv3_small_100'?"),
        ("wideresnet_course:", "did you mean 'wideresnet_course'?"),
        ("torchvision:resnet19", "did you mean 'torchvision:resnet18'?"),
        ("timm:mobilenetv3_smal_100", "did you mean 'timm:mobilenetv3_small_100'?"),
        ("qqq", f"use one of {OURS}, torchvision:NAME, timm:NAME or {IMPORT_PATH_FORM}"),
        (
            "torchvision:qqqqqqqqqqqqqqqqqqqqqqqq",
            f"use one of {OURS}, torchvision:NAME, timm:NAME or {IMPORT_PATH_FORM}",
        ),
    ],
)
def test_an_unknown_name_is_one_line_with_the_nearest_name(name, hint):
    assert error_of(Model(name=name)) == f"model.name: {name!r} is not a model ({hint})"


def test_a_library_that_is_misspelt_is_a_module_that_is_not_there_with_the_nearest_name():
    expected = "model.name: torchvison:resnet18: there is no module torchvison (did you mean 'torchvision'?)"
    assert error_of(Model(name="torchvison:resnet18")) == expected


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


@pytest.mark.parametrize(
    ("name", "field", "alternative"),
    [
        ("torchvision:vgg11", "zero_init_residual", f"one of {RESIDUAL} or a torchvision:resnet"),
        ("torchvision:convnext_tiny", "zero_init_residual", f"one of {RESIDUAL} or a torchvision:resnet"),
        ("torchvision:resnet18", "drop_path", f"one of {RESIDUAL} or torchvision's convnext or swin"),
        ("torchvision:mobilenet_v3_small", "drop_path", f"one of {RESIDUAL} or torchvision's convnext or swin"),
        ("timm:test_vit", "zero_init_residual", f"one of {RESIDUAL} or timm:resnet50"),
        ("timm:vgg11", "drop_path", f"one of {RESIDUAL} or timm:resnet50"),
        ("speednet94", "drop_path", f"one of {RESIDUAL}, wideresnet_course, speednet96"),
        ("speednet94", "zero_init_residual", f"one of {RESIDUAL}"),
        ("speednet96", "zero_init_residual", f"one of {RESIDUAL}"),
    ],
)
def test_a_residual_setting_is_refused_where_it_would_have_no_effect(name, field, alternative):
    value, default = {"drop_path": (0.1, "0.0"), "zero_init_residual": (True, "false")}[field]
    message = error_of(Model.model_validate({"name": name, field: value}))
    shown = str(value).lower()
    assert (
        message == f"model.{field}: {shown} has no effect on {name} (set model.{field}={default}, or use {alternative})"
    )


@pytest.mark.parametrize("drop_path", [0.0, 0.3])
@pytest.mark.parametrize(
    "name",
    [
        "torchvision:convnext_tiny",
        "torchvision:efficientnet_b0",
        "torchvision:swin_t",
        "timm:resnet18",
        "timm:nest_tiny",
    ],
)
def test_drop_path_is_the_largest_probability_whatever_the_librarys_default(name, drop_path):
    """The libraries' rates are made in float32, so they are equal to within 1e-6."""
    model = build(Model(name=name, drop_path=drop_path))
    rates = [module.p for module in model.modules() if isinstance(module, StochasticDepth)]
    rates += [module.drop_prob for module in model.modules() if isinstance(module, DropPath)]
    assert max(rates, default=0.0) == pytest.approx(drop_path, abs=1e-6)
    assert rates or (name, drop_path) in [("timm:resnet18", 0.0), ("timm:nest_tiny", 0.0)]
    assert rates == sorted(rates)


@pytest.mark.parametrize(("name", "num_blocks"), [("torchvision:resnet18", 8), ("timm:resnet18", 8)])
def test_zero_init_is_the_sections_choice_whatever_the_librarys_default(name, num_blocks):
    def zero_scales(zero_init_residual: bool) -> int:
        model = build(Model(name=name, zero_init_residual=zero_init_residual), device="cpu")
        norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
        return sum(module.weight.count_nonzero() == 0 for module in norms)

    assert (zero_scales(False), zero_scales(True)) == (0, num_blocks)


@pytest.mark.parametrize("name", ["torchvision:resnet18", "timm:resnet18", "resnet18_cifar", "speednet94"])
def test_sync_batch_is_built_as_batch(name):
    """Where ranks are known, these layers are exchanged."""
    synchronised, plain = (str(build(Model(name=name, norm=norm))) for norm in ("sync_batch", "batch"))
    assert synchronised == plain
    assert "BatchNorm2d" in plain


@pytest.mark.parametrize("name", ["torchvision:convnext_tiny", "timm:test_vit", "torchvision:vgg11"])
def test_sync_batch_is_refused_where_there_are_no_batch_norms(name):
    expected = f"model.norm: sync_batch has no effect on {name}, which has no batch norms (set model.norm=batch)"
    assert error_of(Model(name=name, norm="sync_batch")) == expected


def test_sync_batch_is_refused_where_exchanging_a_norm_would_lose_an_activation():
    message = error_of(Model(name="timm:efficientnet_b0", norm="sync_batch"))
    assert message.startswith("model.norm: sync_batch cannot replace the batch norms of timm:efficientnet_b0, which")


def test_our_networks_need_neither_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    monkeypatch.setitem(sys.modules, "torchvision", None)
    model = build_model(Model(name="resnet18_cifar", width=0.125), num_classes=2, channels=3)
    assert isinstance(model, nn.Module)


def build(section: Model, device: str = "meta") -> nn.Module:
    """Build `section` for three classes, without contents unless a device is given."""
    with torch.device(device):
        return build_model(section, num_classes=3, channels=3)


def error_of(section: Model) -> str:
    """Return the message of the `RecipeError` that building `section` raises, having checked it is one line."""
    with pytest.raises(RecipeError) as caught:
        build_model(section, num_classes=3, channels=3)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    return message
