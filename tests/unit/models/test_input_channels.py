"""Models adapted to another number of input channels."""

import pytest
import torch
from torch import nn
from torchvision import models

from paceline.models.build import adapt_input_channels


@pytest.mark.parametrize("channels", [1, 2, 4])
def test_only_the_input_channels_of_the_first_convolution_change(channels):
    first = nn.Conv2d(3, 8, (3, 5), (2, 1), (1, 2), (1, 2), padding_mode="reflect", dtype=torch.float64)
    second = nn.Conv2d(8, 8, 3)
    model = nn.Sequential(nn.Sequential(first), second)
    adapt_input_channels(model, channels)
    replacement = model[0][0]
    assert replacement.extra_repr() == first.extra_repr().replace("3, 8", f"{channels}, 8", 1)
    assert replacement.weight.dtype == torch.float64
    assert replacement.bias is first.bias
    assert model[1] is second


def test_equal_channels_leave_the_network_alone():
    model = nn.Sequential(nn.Conv2d(3, 8, 3))
    first = model[0]
    adapt_input_channels(model, 3)
    assert model[0] is first


@pytest.mark.parametrize("name", ["resnet18", "vgg11", "convnext_tiny", "mobilenet_v3_small", "densenet121"])
def test_new_filters_have_the_distribution_of_the_old(name):
    """The deviation of 144 draws, the fewest here, has a standard error of 6 %, so 20 % is three of them."""
    torch.manual_seed(0)
    model = models.get_model(name, weights=None, num_classes=2)
    before = first_conv(model).weight
    adapt_input_channels(model, 1)
    after = first_conv(model).weight
    assert after.shape == (before.shape[0], 1, *before.shape[2:])
    assert after.requires_grad
    assert torch.isin(after, before).all()
    assert after.std().item() == pytest.approx(before.std().item(), rel=0.2)


def first_conv(model: nn.Module) -> nn.Conv2d:
    """Return the convolution that reads the image."""
    return next(module for module in model.modules() if isinstance(module, nn.Conv2d))
