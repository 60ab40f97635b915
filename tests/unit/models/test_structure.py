"""Layer numbers of parameters: timm's own for its models, one rule for all others."""

from collections import Counter

import pytest
import torch
from timm import create_model
from torch import nn
from torchvision import models

from paceline.models.build import MODEL_NAMES, build_model
from paceline.models.structure import number_layers
from paceline.recipe.schema.model import Model

OURS = {
    "resnet18_cifar": 10, "resnet34_cifar": 18, "resnet50_cifar": 18, "resnet50_nersc": 18, "wideresnet_course": 8,
    "speednet94": 8, "speednet95": 8, "speednet96": 7,
}  # fmt: skip
"""How many layers our networks have: a stem, their blocks, and a classifier."""
TORCHVISIONS = {
    "resnet18": 10, "resnet50": 18, "vit_b_32": 14, "swin_t": 17, "convnext_tiny": 23, "efficientnet_b0": 19,
    "mobilenet_v3_small": 14, "densenet121": 63, "vgg11_bn": 11, "shufflenet_v2_x0_5": 18,
}  # fmt: skip


def of_torchvision(name: str) -> nn.Module:
    with torch.device("meta"):
        return models.get_model(name, weights=None)


def assert_whole(model: nn.Module, numbers: dict[str, int]) -> None:
    """Every parameter has a layer, none is empty, and none comes after one that it was defined before."""
    assert list(numbers) == [name for name, _ in model.named_parameters()]
    found = list(numbers.values())
    assert found == sorted(found)
    assert set(found) == set(range(max(found) + 1))


@pytest.mark.parametrize(("name", "num_layers"), OURS.items())
def test_layers_of_built_in_models_are_the_stem_every_block_and_the_classifier(name: str, num_layers: int) -> None:
    model = build_model(Model(name=name, width=0.1), num_classes=7, channels=3)
    numbers = number_layers(model)
    assert_whole(model, numbers)
    assert max(numbers.values()) + 1 == num_layers
    assert numbers["classifier.weight"] == num_layers - 1


def test_all_built_in_models_are_tested() -> None:
    assert set(OURS) == set(MODEL_NAMES)


@pytest.mark.parametrize(("name", "num_layers"), TORCHVISIONS.items())
def test_torchvisions_networks_are_distinguished_block_by_block(name: str, num_layers: int) -> None:
    model = of_torchvision(name)
    numbers = number_layers(model)
    assert_whole(model, numbers)
    assert max(numbers.values()) + 1 == num_layers


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_the_rule_gives_a_residual_network_the_layers_that_timm_gives_it(name: str) -> None:
    """Torchvision's and timm's have parameters of the same names, and only timm's says what its layers are."""
    assert number_layers(of_torchvision(name)) == number_layers(create_model(name, num_classes=1000))


def test_tokens_and_positions_are_of_the_stem_and_the_last_norm_of_the_classifier() -> None:
    numbers = number_layers(of_torchvision("vit_b_32"))
    assert {numbers[name] for name in ("class_token", "conv_proj.weight", "encoder.pos_embedding")} == {0}
    assert numbers["encoder.layers.encoder_layer_0.ln_1.weight"] == 1
    assert numbers["encoder.layers.encoder_layer_11.mlp.3.bias"] == 12
    assert numbers["encoder.ln.weight"] == numbers["heads.head.weight"] == 13


def test_without_blocks_each_weight_is_a_layer_and_norms_belong_to_the_one_before() -> None:
    model = nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()),
        nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU()),
        nn.Linear(4, 2),
    )
    assert Counter(number_layers(model).values()) == {0: 4, 1: 4, 2: 2}
    assert number_layers(model)["1.1.bias"] == 1


def test_a_subclass_of_a_container_that_holds_only_blocks_is_a_container() -> None:
    class Block(nn.Sequential):
        pass

    class Stage(nn.Sequential):
        pass

    def block() -> Block:
        return Block(nn.Linear(2, 2), nn.LayerNorm(2))

    model = nn.Sequential(Stage(block(), block()), Stage(block(), nn.Identity()), nn.Linear(2, 2))
    assert Counter(number_layers(model).values()) == {0: 4, 1: 4, 2: 4, 3: 2}


def test_a_weight_that_two_layers_share_is_of_the_first() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    model[2].weight = model[0].weight
    assert number_layers(model) == {"0.weight": 0, "0.bias": 0, "1.weight": 1, "1.bias": 1, "2.bias": 1}
