"""The residual networks against torchvision's, with stochastic depth and zero-initialized branches."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torchvision import models

from paceline.models.build import build_model
from paceline.models.layers import DropPath, build_layer_factory
from paceline.models.resnet_cifar import build_basic_block, build_bottleneck_block
from paceline.recipe.schema.model import Model


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


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize(("make_block", "in_channels"), [(build_basic_block, 4), (build_bottleneck_block, 16)])
def test_with_zero_init_a_block_starts_as_its_shortcut_and_leaves_it(make_block, in_channels, norm):
    """The scale of the last norm has a gradient, so the branch does not stay at zero."""
    torch.manual_seed(0)
    block = make_block(build_layer_factory(norm, zero_init_residual=True), in_channels, 4, 1)
    x = torch.randn(3, in_channels, 8, 8)
    out = block(x)
    assert torch.equal(out, F.relu(x))
    out.pow(2).sum().backward()
    assert block.branch[-1].weight.grad.count_nonzero() > 0


@pytest.mark.parametrize("ours", ["resnet18_cifar", "resnet50_cifar"])
def test_zero_init_changes_the_norms_that_torchvisions_option_changes(ours):
    torch.manual_seed(0)
    reference = models.get_model(ours.removesuffix("_cifar"), weights=None, zero_init_residual=True)
    model = build_model(Model(name=ours, zero_init_residual=True), num_classes=1000, channels=3)
    zeros = [
        [position for position, p in enumerate(network.parameters()) if p.ndim == 1 and p.count_nonzero() == 0]
        for network in (model, reference)
    ]
    plain = build_model(Model(name=ours), num_classes=1000, channels=3)
    biases = [i for i, p in enumerate(plain.parameters()) if p.ndim == 1 and p.count_nonzero() == 0]
    assert zeros[0] == zeros[1]
    assert len(zeros[0]) == len(biases) + {"resnet18_cifar": 8, "resnet50_cifar": 16}[ours]


@pytest.mark.parametrize(
    ("name", "num_blocks"), [("resnet18_cifar", 8), ("resnet50_nersc", 16), ("wideresnet_course", 6), ("speednet96", 3)]
)
def test_drop_path_rises_in_proportion_to_depth_and_changes_no_tensor_name(name, num_blocks):
    plain, dropping = (
        build_model(Model(name=name, width=0.125, drop_path=drop_path), num_classes=3, channels=3)
        for drop_path in (0.0, 0.5)
    )
    rates = [module.probability for module in dropping.modules() if isinstance(module, DropPath)]
    assert rates == [0.5 * block / num_blocks for block in range(1, num_blocks + 1)]
    assert not any(isinstance(module, DropPath) for module in plain.modules())
    assert list(plain.state_dict()) == list(dropping.state_dict())


@pytest.mark.parametrize("name", ["resnet18_cifar", "wideresnet_course", "speednet96"])
def test_drop_path_changes_training_alone(name):
    def outputs(drop_path: float) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = build_model(Model(name=name, width=0.125, drop_path=drop_path), num_classes=3, channels=3)
        images = torch.randn(8, 3, 16, 16)
        torch.manual_seed(1)
        return [model.eval()(images), model.train()(images)]

    plain, dropping = outputs(0.0), outputs(0.9)
    assert torch.equal(plain[0], dropping[0])
    assert not torch.equal(plain[1], dropping[1])


@pytest.mark.parametrize("make_block", [build_basic_block, build_bottleneck_block])
def test_a_dropped_sample_passes_by_the_shortcut_and_the_others_by_a_branch_of_more_weight(make_block):
    torch.manual_seed(0)
    in_channels = {build_basic_block: 4, build_bottleneck_block: 16}[make_block]
    block = make_block(build_layer_factory("group"), in_channels, 4, 1, 0.5)
    x = torch.randn(64, in_channels, 4, 4)
    out = block(x)
    dropped = torch.tensor([torch.equal(image, F.relu(of)) for image, of in zip(out, x, strict=True)])
    branch = block.branch[:-1](x)
    assert 0 < dropped.sum() < 64
    assert torch.equal(out[~dropped], F.relu(2 * branch + x)[~dropped])
