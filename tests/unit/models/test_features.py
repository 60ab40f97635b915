"""Features of a model: the input of its classifier, equal to timm's own; and gray thumbnails."""

import pytest
import torch
from torch import nn

from paceline.core.errors import RecipeError
from paceline.models.build import build_model
from paceline.models.features import (
    capture_features,
    capture_outputs,
    feature_tensors,
    find_feature_layer,
    find_stages,
    to_thumbnails,
)
from paceline.recipe.schema.model import Model

IMAGES = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))


def features_of(model: nn.Module, name: str, images: torch.Tensor = IMAGES) -> torch.Tensor:
    """Return the features of `images`."""
    layer = find_feature_layer(model, 5, name)
    with capture_features(model.eval(), layer) as captured, torch.inference_mode():
        model(images)
    assert len(captured) == 1
    return captured[0]


@pytest.mark.parametrize("name", ["resnet10t", "convnext_atto", "mobilenetv3_small_050", "test_vit", "test_byobnet"])
def test_features_are_timms(name: str) -> None:
    model = build_model(Model(name=f"timm:{name}"), num_classes=5, channels=3, image_size=64)
    found = features_of(model, name)
    with torch.inference_mode():
        expected = model.forward_head(model.forward_features(IMAGES), pre_logits=True)
    assert torch.equal(found, expected.flatten(1))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("timm:resnet10t", ["layer1.0", "layer2.0", "layer3.0"]),  # features are the mean of layer4
        ("timm:efficientnet_b0", ["blocks.4", "blocks.5", "blocks.6"]),
        ("timm:test_vit", ["blocks.3", "blocks.4", "blocks.5"]),
        ("torchvision:resnet18", ["layer3.0", "layer3.1", "layer4.0"]),
    ],
)
def test_stages_are_the_last_blocks_whose_outputs_differ_from_the_features(name: str, expected: list[str]) -> None:
    model = build_model(Model(name=name), num_classes=5, channels=3, image_size=64).eval()
    with torch.inference_mode():
        stages = find_stages(model, find_feature_layer(model, 5, name), IMAGES[:1])
        with capture_outputs(model, stages) as outputs:
            model(IMAGES)
    assert list(outputs) == stages == expected
    with torch.inference_mode():
        seen = []
        handle = model.get_submodule(stages[-1]).register_forward_hook(lambda _, __, output: seen.append(output))
        model(IMAGES)
        handle.remove()
    mean = seen[0].mean(dim=(2, 3)) if seen[0].ndim == 4 else seen[0].mean(dim=1)
    assert torch.allclose(outputs[stages[-1]][0], mean, atol=1e-6)


def test_a_convolution_as_classifier_is_pooled() -> None:
    model = build_model(Model(name="torchvision:squeezenet1_1"), num_classes=5, channels=3, image_size=64)
    found = features_of(model, "squeezenet1_1")
    with torch.inference_mode():
        assert torch.allclose(found, model.features(IMAGES).mean(dim=(2, 3)))


def test_the_hook_is_removed_and_the_classifier_does_not_count() -> None:
    model = build_model(Model(name="resnet18_cifar", width=0.125), num_classes=5, channels=3)
    layer = find_feature_layer(model, 5, "resnet18_cifar")
    with capture_features(model, layer) as captured:
        pass
    model(IMAGES)
    assert not captured
    names = set(model.state_dict()) - set(feature_tensors(model, layer))
    assert names == {f"{layer}.weight", f"{layer}.bias"}


def test_a_model_without_a_classifier_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"^model\.name: mine: .* 7 outputs \(name a model"):
        find_feature_layer(nn.Linear(3, 5), 7, "mine")


def test_thumbnails_are_gray_and_span_the_range() -> None:
    thumbnails = to_thumbnails((IMAGES * 100).to(torch.uint8), 32)
    assert thumbnails.shape == (2, 32, 32) and thumbnails.dtype == torch.uint8
    assert thumbnails.amin(dim=(1, 2)).tolist() == [0, 0] and thumbnails.amax(dim=(1, 2)).tolist() == [255, 255]
    assert to_thumbnails(torch.full((1, 1, 8, 8), 7, dtype=torch.uint8), 32).max() == 0  # of one color
