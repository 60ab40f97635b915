"""The empty model costs next to nothing, and trains, compiles and refuses settings like any other."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from paceline.core.errors import RecipeError
from paceline.models.build import MODEL_NAMES, build_model
from paceline.recipe.schema.model import Model


def empty(channels: int = 3, num_classes: int = 5) -> nn.Module:
    torch.manual_seed(0)
    return build_model(Model(name="empty"), num_classes=num_classes, channels=channels)


def test_it_is_no_network_to_choose_for_its_accuracy() -> None:
    assert "empty" not in MODEL_NAMES


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [1, 8, 33])
def test_logits_are_linear_in_the_mean_of_each_channel(channels: int, size: int) -> None:
    model = empty(channels)
    images = torch.randn(4, channels, size, size)
    weight, bias = model.parameters()
    assert weight.shape == (5, channels) and bias.shape == (5,)
    assert torch.equal(model(images), F.linear(images.mean(dim=(2, 3)), weight, bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_weight_learns_under_autocast_and_in_any_layout(dtype: torch.dtype) -> None:
    model = empty().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    images = torch.randn(4, 3, 16, 16).to(memory_format=torch.channels_last)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype != torch.float32):
        logits = model(images)
    assert logits.dtype == dtype
    F.cross_entropy(logits.float(), torch.arange(4)).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    assert len(gradients) == 2
    assert all(gradient is not None and gradient.count_nonzero() for gradient in gradients)


def test_it_compiles_into_one_graph() -> None:
    model = empty()
    images = torch.randn(4, 3, 16, 16)
    assert torch.equal(torch.compile(model, fullgraph=True, backend="eager")(images), model(images))


@pytest.mark.parametrize(
    ("field", "value", "default"),
    [
        ("norm", "group", "batch"),
        ("norm", "sync_batch", "batch"),
        ("width", 0.5, "1.0"),
        ("drop_path", 0.1, "0.0"),
        ("zero_init_residual", True, "false"),
    ],
)
def test_what_would_have_no_effect_is_refused(field: str, value: object, default: str) -> None:
    with pytest.raises(RecipeError) as caught:
        build_model(Model.model_validate({"name": "empty", field: value}), num_classes=5, channels=3)
    shown = str(value).lower()
    assert str(caught.value).startswith(
        f"model.{field}: {shown} has no effect on empty (set model.{field}={default}, or use one of resnet18_cifar, "
    )
