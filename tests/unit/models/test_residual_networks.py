"""Our residual networks against torchvision's, and the pre-activation block against its formula."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torchvision import models

from paceline.models.norms import build_layers
from paceline.models.wide_resnet import PreActivationBlock
from paceline.models.zoo import build_model
from paceline.recipe.schema.recipe import Model


def torchvision_reference(name: str, stem_kernel: int) -> nn.Module:
    """Return torchvision's network with a stem of stride 1 and no pooling."""
    reference = models.get_model(name, weights=None, num_classes=10)
    reference.conv1 = nn.Conv2d(3, 64, stem_kernel, 1, stem_kernel // 2, bias=False)
    reference.maxpool = nn.Identity()
    return reference


@pytest.mark.parametrize(
    ("ours", "theirs", "stem_kernel"),
    [
        ("resnet18_cifar", "resnet18", 3),
        ("resnet34_cifar", "resnet34", 3),
        ("resnet50_cifar", "resnet50", 3),
        ("resnet50_nersc", "resnet50", 7),
    ],
)
def test_logits_equal_torchvisions_with_the_small_stem_for_equal_weights(ours, theirs, stem_kernel):
    """Parameters are in the same order; float64 and the tolerance of `assert_close` absorb how means are summed."""
    torch.manual_seed(0)
    reference = torchvision_reference(theirs, stem_kernel).double().eval()
    model = build_model(Model(name=ours), num_classes=10, channels=3).double().eval()
    weights = zip(model.state_dict(), reference.state_dict().values(), strict=True)
    model.load_state_dict(dict(weights))
    images = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(model(images), reference(images))


def test_a_block_of_unequal_shapes_projects_the_activated_input():
    block = PreActivationBlock(build_layers("batch"), 4, 6, stride=2)
    x = torch.randn(2, 4, 8, 8)
    activated = F.relu(block.norm1(x))
    expected = block.projection(activated) + block.conv2(F.relu(block.norm2(block.conv1(activated))))
    assert torch.equal(block(x), expected)
    assert expected.shape == (2, 6, 4, 4)


def test_without_norm_a_block_of_equal_shapes_starts_as_the_identity():
    """Negative values survive too: the activation is not done in place."""
    block = PreActivationBlock(build_layers("none"), 4, 4, stride=1)
    x = torch.randn(2, 4, 8, 8)
    assert (x < 0).any()
    assert torch.equal(block(x), x)
