"""Normalization layers and the convolutions that go with them."""

import math

import pytest
import torch
from torch import nn

from paceline.models.layers import build_layer_factory, build_norm, choose_num_groups, scale_channels

NORM_LAYERS = [
    ("batch", nn.BatchNorm2d),
    ("sync_batch", nn.BatchNorm2d),
    ("group", nn.GroupNorm),
    ("none", nn.Identity),
]


@pytest.mark.parametrize(("norm", "layer"), NORM_LAYERS)
def test_each_norm_is_its_layer_and_keeps_the_shape(norm, layer):
    module = build_norm(norm)(48)
    assert isinstance(module, layer)
    assert module(torch.randn(2, 48, 3, 5)).shape == (2, 48, 3, 5)


@pytest.mark.parametrize(
    ("channels", "groups"), [(1, 1), (16, 16), (37, 1), (48, 24), (62, 31), (64, 32), (80, 20), (160, 32)]
)
def test_groups_are_the_largest_divisor_up_to_32(channels, groups):
    assert choose_num_groups(channels) == groups
    assert build_norm("group")(channels).num_groups == groups


@pytest.mark.parametrize(("norm", "has_bias"), [("batch", False), ("group", False), ("none", True)])
def test_convolutions_have_a_bias_exactly_without_norm(norm, has_bias):
    layers = build_layer_factory(norm)
    for conv in (layers.conv(3, 8, 3), layers.last_conv(8, 8, 1)):
        assert (conv.bias is not None) is has_bias


@pytest.mark.parametrize(("norm", "fan"), [("batch", 128 * 9), ("group", 128 * 9), ("none", 32 * 9)])
def test_filters_have_the_variance_of_he_et_al(norm, fan):
    """The deviation of 36,864 normal draws has a standard error of 0.4 %, so 2 % is five of them."""
    torch.manual_seed(0)
    weight = build_layer_factory(norm).conv(32, 128, 3).weight
    assert weight.std().item() == pytest.approx(math.sqrt(2 / fan), rel=0.02)


def test_only_without_norm_a_branch_starts_at_zero():
    assert build_layer_factory("none").last_conv(4, 4, 3).weight.count_nonzero() == 0
    assert build_layer_factory("batch").last_conv(4, 4, 3).weight.count_nonzero() == 4 * 4 * 9


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_only_the_last_norm_of_a_branch_starts_at_zero_and_only_on_request(norm):
    layers = build_layer_factory(norm, zero_init_residual=True)
    assert layers.last_norm(4).weight.count_nonzero() == 0
    assert torch.equal(layers.norm(4).weight, torch.ones(4))
    assert torch.equal(build_layer_factory(norm).last_norm(4).weight, torch.ones(4))


def test_scaled_channels_are_rounded_and_never_none():
    assert [scale_channels(64, width) for width in (1.0, 0.3, 2.5, 1e-9)] == [64, 19, 160, 1]
