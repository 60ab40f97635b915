"""The airbench networks: sizes, pooling, initial weights, and that they learn."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from paceline.models.build import build_model
from paceline.models.layers import init_from_data
from paceline.recipe.schema.model import Model

SPEEDNETS = ("speednet94", "speednet95", "speednet96")


def small(name: str, norm: str = "batch", *, channels: int = 3) -> nn.Module:
    """Build a network at an eighth of its width for four classes."""
    return build_model(Model(name=name, norm=norm, width=0.125), num_classes=4, channels=channels)


@pytest.mark.parametrize(
    ("name", "published", "filters", "normalised"),
    [
        (
            "speednet94",
            1.97e6,
            9 * (24 * 64 + 64 * 64 + 64 * 256 + 256 * 256 + 256 * 256 + 256 * 256),
            2 * (64 + 256 + 256),
        ),
        (
            "speednet96",
            9.92e6,
            9 * (24 * 128 + 2 * 128 * 128 + 128 * 384 + 2 * 384 * 384 + 384 * 512 + 2 * 512 * 512),
            3 * (128 + 384 + 512),
        ),
    ],
)
def test_the_size_is_the_published_one(name, published, filters, normalised):
    """Whitening has 24 filters of 12 and biases, a norm a scale and a bias, and the classifier no bias.

    Published figures have three digits: half a unit of the last is 0.3 % at most.
    """
    with torch.device("meta"):
        model = build_model(Model(name=name), num_classes=10, channels=3)
    num_parameters = sum(p.numel() for p in model.parameters())
    last_channels = model.classifier.in_features
    assert num_parameters == 24 * 12 + 24 + filters + 2 * normalised + 10 * last_channels
    assert num_parameters == pytest.approx(published, rel=0.003)


@pytest.mark.parametrize("size", [28, 32])
@pytest.mark.parametrize("name", SPEEDNETS)
def test_the_end_is_max_pooling_by_three_and_a_classifier_scaled_by_a_ninth(name, size):
    """`assert_close` absorbs the order of a sum."""
    torch.manual_seed(0)
    model = small(name).eval()
    images = torch.randn(2, 3, size, size)
    features = model.blocks(F.gelu(model.whitening(images)))
    assert features.shape[2:] == (3, 3)
    expected = F.linear(F.max_pool2d(features, 3).flatten(1), model.classifier.weight / 9)
    torch.testing.assert_close(model(images), expected)


@pytest.mark.parametrize(("channels", "size"), [(1, 28), (2, 9), (3, 64)])
@pytest.mark.parametrize("name", SPEEDNETS)
def test_any_channels_and_sizes_give_logits(name, channels, size):
    model = small(name, channels=channels)
    assert model.whitening.out_channels == 8 * channels
    assert model(torch.randn(4, channels, size, size)).shape == (4, 4)


@pytest.mark.parametrize("name", SPEEDNETS)
def test_convolutions_start_as_the_identity_on_their_inputs(name):
    torch.manual_seed(0)
    model = build_model(Model(name=name, width=0.25), num_classes=4, channels=3)
    convs = [module for module in model.blocks.modules() if isinstance(module, nn.Conv2d)]
    x = torch.randn(1, 128, 5, 5)
    for conv in convs:
        shared = min(conv.in_channels, conv.out_channels)
        given = x[:, : conv.in_channels]
        assert torch.equal(conv(given)[:, :shared], given[:, :shared])
    assert len(convs) == {"speednet94": 6, "speednet95": 6, "speednet96": 9}[name]


@pytest.mark.parametrize(("name", "momentum"), [("speednet94", 0.4), ("speednet95", 0.4), ("speednet96", 0.1)])
def test_batch_norms_have_a_fixed_scale_and_the_published_constants(name, momentum):
    for norm in ("batch", "sync_batch"):
        norms = [module for module in small(name, norm).modules() if isinstance(module, nn.BatchNorm2d)]
        assert len(norms) == {"speednet94": 6, "speednet95": 6, "speednet96": 9}[name]
        for module in norms:
            assert (module.momentum, module.eps) == (momentum, 1e-12)
            assert torch.equal(module.weight, torch.ones_like(module.weight))
            assert not module.weight.requires_grad
            assert module.bias.requires_grad


def test_a_block_of_speednet96_adds_its_pair_of_convolutions_to_their_input():
    torch.manual_seed(0)
    model = small("speednet96").eval()
    block = model.blocks[0]
    x = torch.randn(2, 24, 10, 10)
    before = block[:-1](x)
    conv2, norm2, _, conv3, norm3 = block[-1].branch
    expected = F.gelu(before + norm3(conv3(F.gelu(norm2(conv2(before))))))
    assert torch.equal(block(x), expected)


@pytest.mark.parametrize("norm", ["batch", "none"])
@pytest.mark.parametrize("name", SPEEDNETS)
def test_training_lowers_the_loss_and_leaves_fixed_parameters_alone(name, norm):
    """Four noisy patterns, twenty steps. Seen over seeds 0-2, without fitting to data: 1.4 down to 0.00 to 0.95."""
    torch.manual_seed(0)
    model = small(name, norm)
    labels = torch.arange(32) % 4
    images = torch.randn(4, 3, 16, 16)[labels] + 0.5 * torch.randn(32, 3, 16, 16)
    init_from_data(model, images)
    fixed = [(p, p.clone()) for p in model.parameters() if not p.requires_grad]
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    for _ in range(20):
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    assert F.cross_entropy(model(images), labels) < 1.2
    assert fixed
    assert all(torch.equal(now, before) for now, before in fixed)


def test_tensor_names_are_those_of_earlier_checkpoints():
    names = {name: [key for key in small(name).state_dict() if "running" not in key] for name in SPEEDNETS}
    for name, keys in names.items():
        assert keys[:2] == ["whitening.conv.weight", "whitening.conv.bias"]
        assert keys[-1] == "classifier.weight"
        assert "blocks.0.0.weight" in keys, name
    assert "blocks.2.4.weight" in names["speednet94"]
    assert "blocks.2.5.bias" in names["speednet94"]
    assert "blocks.2.4.branch.3.weight" in names["speednet96"]
    assert "blocks.2.4.branch.4.bias" in names["speednet96"]
