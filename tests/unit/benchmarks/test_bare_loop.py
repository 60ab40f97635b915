"""The hand-written loop that the overhead benchmark measures against does the same work as paceline."""

import importlib.util
import io
from itertools import islice
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from paceline.models.build import build_model
from paceline.recipe.schema.model import Model

PATH = Path(__file__).parents[3] / "benchmarks" / "bare_loop.py"


@pytest.fixture(scope="module")
def bare_loop() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bare_loop", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def networks(bare_loop: ModuleType) -> tuple[nn.Module, nn.Module]:
    """Ours, and the bare one with our weights."""
    torch.manual_seed(0)
    ours = build_model(Model(name="resnet18_cifar", width=0.1), num_classes=10, channels=3)
    bare = bare_loop.ResNet18(num_classes=10, width=0.1)
    bare.load_state_dict(dict(zip(bare.state_dict(), ours.state_dict().values(), strict=True)))
    return ours, bare


def test_it_imports_no_paceline() -> None:
    assert "import torch" in PATH.read_text()
    assert "from paceline" not in PATH.read_text() and "import paceline" not in PATH.read_text()


def test_the_bare_network_is_ours_layer_by_layer(networks: tuple[nn.Module, nn.Module]) -> None:
    def layers(network: nn.Module) -> list[str]:
        kinds = (nn.Conv2d, nn.BatchNorm2d, nn.Linear)
        return [repr(module) for module in network.modules() if isinstance(module, kinds)]

    ours, bare = networks
    assert len(layers(ours)) == 41  # 20 convolutions with a norm each (17 3x3 and 3 shortcuts), and the classifier
    assert layers(bare) == layers(ours)


def test_the_same_weights_give_the_same_loss_and_gradients(networks: tuple[nn.Module, nn.Module]) -> None:
    images, labels = torch.randn(4, 3, 32, 32), torch.arange(4)
    losses = [nn.functional.cross_entropy(network(images), labels) for network in networks]
    assert losses[0].item() == losses[1].item()
    gradients = [torch.autograd.grad(loss, list(net.parameters())) for loss, net in zip(losses, networks, strict=True)]
    for ours, bare in zip(*gradients, strict=True):
        # The same kernels in the same order; the tolerance is for sums that threads may split differently.
        torch.testing.assert_close(bare, ours, rtol=1e-6, atol=1e-6)


def test_a_batch_holds_windows_of_the_padded_images_some_of_them_mirrored(bare_loop: ModuleType) -> None:
    torch.manual_seed(0)
    images = torch.randint(0, 256, (20, 3, 6, 6), dtype=torch.uint8)
    labels = torch.arange(20)
    padded = nn.functional.pad(images, [4] * 4)
    num_flipped = 0
    for crops, chosen in islice(bare_loop.batches(images, labels, 10), 2):
        for crop, label in zip(crops, chosen, strict=True):
            windows = [padded[label, :, row : row + 6, column : column + 6] for row in range(9) for column in range(9)]
            is_plain = any(torch.equal(crop, window) for window in windows)
            is_flipped = any(torch.equal(crop, window.flip(2)) for window in windows)
            assert is_plain or is_flipped
            num_flipped += is_flipped and not is_plain
    assert 0 < num_flipped < 20


def test_an_epoch_visits_every_image_once(bare_loop: ModuleType) -> None:
    images, labels = torch.zeros(20, 3, 4, 4, dtype=torch.uint8), torch.arange(20)
    source = bare_loop.batches(images, labels, 5)
    for _ in range(2):
        seen = torch.cat([chosen for _, chosen in islice(source, 4)])
        assert sorted(seen.tolist()) == list(range(20))


def test_it_reports_every_ten_steps_and_ends_after_the_given_steps(bare_loop: ModuleType) -> None:
    out = io.StringIO()
    images, labels = torch.zeros(8, 3, 8, 8, dtype=torch.uint8), torch.arange(8)
    source = bare_loop.batches(images, labels, 4)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 10))
    losses = list(bare_loop.train(model, source, num_steps=21, peak_lr=0.1, mean=(0.5,) * 3, std=(0.25,) * 3, out=out))
    assert len(losses) == 21
    assert [line.split()[1] for line in out.getvalue().splitlines()] == ["10", "20"]
