"""The DDP course's network against facts of the one that its material prints, from a transcription."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.core.errors import RecipeError
from paceline.models.build import build_model
from paceline.models.wide_resnet import WideBlock
from paceline.recipe.schema.model import Model

PARAMETERS = 17_117_466
LAYERS = """\
Conv2d 16x1x3x3 -> 16x28x28
BatchNorm2d 16 16 -> 16x28x28
ReLU -> 16x28x28
Conv2d 160x16x3x3 -> 160x28x28
BatchNorm2d 160 160 -> 160x28x28
ReLU -> 160x28x28
Dropout -> 160x28x28
Conv2d 160x160x3x3 -> 160x28x28
BatchNorm2d 160 160 -> 160x28x28
ReLU -> 160x28x28
Conv2d 160x16x1x1 160 -> 160x28x28
Conv2d 160x160x3x3 -> 160x28x28
BatchNorm2d 160 160 -> 160x28x28
ReLU -> 160x28x28
Dropout -> 160x28x28
Conv2d 160x160x3x3 -> 160x28x28
BatchNorm2d 160 160 -> 160x28x28
ReLU -> 160x28x28
MaxPool2d -> 160x14x14
Conv2d 320x160x3x3 -> 320x14x14
BatchNorm2d 320 320 -> 320x14x14
ReLU -> 320x14x14
Dropout -> 320x14x14
Conv2d 320x320x3x3 -> 320x14x14
BatchNorm2d 320 320 -> 320x14x14
ReLU -> 320x14x14
Conv2d 320x160x1x1 320 -> 320x14x14
Conv2d 320x320x3x3 -> 320x14x14
BatchNorm2d 320 320 -> 320x14x14
ReLU -> 320x14x14
Dropout -> 320x14x14
Conv2d 320x320x3x3 -> 320x14x14
BatchNorm2d 320 320 -> 320x14x14
ReLU -> 320x14x14
MaxPool2d -> 320x7x7
Conv2d 640x320x3x3 -> 640x7x7
BatchNorm2d 640 640 -> 640x7x7
ReLU -> 640x7x7
Dropout -> 640x7x7
Conv2d 640x640x3x3 -> 640x7x7
BatchNorm2d 640 640 -> 640x7x7
ReLU -> 640x7x7
Conv2d 640x320x1x1 640 -> 640x7x7
Conv2d 640x640x3x3 -> 640x7x7
BatchNorm2d 640 640 -> 640x7x7
ReLU -> 640x7x7
Dropout -> 640x7x7
Conv2d 640x640x3x3 -> 640x7x7
BatchNorm2d 640 640 -> 640x7x7
ReLU -> 640x7x7
AvgPool2d -> 640x1x1
Flatten -> 640
Linear 10x640 10 -> 10
""".splitlines()
"""Every layer in the order in which it runs, the shapes of its parameters, and its output's at 28 pixels."""
LOGITS = {
    28: [
        [3.98307238, -21.22617858, -15.88222891, -16.43659887, 2.33833818,
         15.27588551, -10.70668458, 23.14134178, 30.79073739, 30.76827257],
        [5.57783711, -20.67919245, -15.51231176, -17.08032188, 2.53144309,
         14.31838816, -11.05963744, 25.24206315, 33.25315114, 31.23147787],
    ],
    32: [
        [9.00897065, -20.06668834, -18.55303216, -22.09242173, 4.87933076,
         12.69593821, -11.40688815, 25.33230026, 37.33408244, 36.15593898],
        [9.73609877, -19.21518424, -18.86727855, -20.79808191, 8.42980057,
         15.64164131, -10.30682284, 27.50576649, 36.55979736, 36.37446953],
    ],
}  # fmt: skip
"""Of two images of each size, at an eighth of the width, in evaluation and in float64, with what `fill` sets."""


def course_network(*, width: float = 0.125, channels: int = 1, norm: str = "batch", **settings: object) -> nn.Module:
    return build_model(
        Model(name="wideresnet_course", width=width, norm=norm, **settings), num_classes=10, channels=channels
    )


def noise(shape: tuple[int, ...], start: int) -> Tensor:
    """Return numbers between -1 and 1 that depend on nothing but their place: hashes by multiplying and shifting."""
    hashed = np.arange(math.prod(shape), dtype=np.uint64) + np.uint64(start * 1_000_003)
    for factor, shift in ((2654435761, 15), (2246822519, 13)):
        hashed = hashed * np.uint64(factor) % np.uint64(2**32)
        hashed ^= hashed >> np.uint64(shift)
    return torch.from_numpy(hashed.astype(np.float64) / 2**31 - 1).reshape(shape)


@torch.no_grad()
def fill(model: nn.Module) -> None:
    """Give every parameter, and the running statistics of every norm, numbers of its own."""
    for number, parameter in enumerate(model.parameters()):
        values = noise(tuple(parameter.shape), number)
        parameter.copy_(values * math.sqrt(6 / parameter[0].numel()) if parameter.ndim > 1 else 1 + values / 2)
    for number, buffer in enumerate(buffer for buffer in model.buffers() if buffer.ndim):
        buffer.copy_(1 + noise(tuple(buffer.shape), number) / 2)


def test_layers_their_order_and_shapes_are_those_that_the_course_prints():
    ran = []

    def note(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        shapes = ("x".join(map(str, each.shape)) for each in module.parameters(recurse=False))
        ran.append(" ".join([type(module).__name__, *shapes, "->", "x".join(map(str, out.shape[1:]))]))

    with torch.device("meta"):
        model = course_network(width=1.0).eval()
        leaves = [each for each in model.modules() if next(each.children(), None) is None]
        for module in leaves:
            if not isinstance(module, nn.Identity):
                module.register_forward_hook(note)
        model(torch.empty(1, 1, 28, 28))
    functions = ("AvgPool2d", "Flatten")  # functions here, and modules there
    assert ran == [layer for layer in LAYERS if not layer.startswith(functions)]
    assert {layer.p for layer in leaves if isinstance(layer, nn.Dropout)} == {0.01}
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS


@pytest.mark.parametrize("size", LOGITS)
def test_logits_for_fixed_weights_are_those_of_the_course(size):
    """At 28 pixels, which its network is made for, and at its assessment's 32. The expected values have 8 decimals."""
    model = course_network().double().eval()
    fill(model)
    with torch.no_grad():
        logits = model(noise((2, 1, size, size), size))
    torch.testing.assert_close(logits, torch.tensor(LOGITS[size], dtype=torch.float64), rtol=0, atol=2e-8)


def test_initial_weights_are_those_that_torch_gives_the_layers_in_this_order():
    torch.manual_seed(3)
    model = course_network()
    torch.manual_seed(3)
    weighted = [module for module in model.modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    assert len(weighted) == 1 + 6 * 2 + 3 + 1
    for module in weighted:
        has_bias = module.bias is not None
        if isinstance(module, nn.Linear):
            fresh = nn.Linear(module.in_features, module.out_features)
        else:
            sizes = (module.in_channels, module.out_channels, module.kernel_size)
            fresh = nn.Conv2d(*sizes, padding=module.padding, bias=has_bias)
        assert torch.equal(module.weight, fresh.weight)
        assert not has_bias or torch.equal(module.bias, fresh.bias)


def test_of_smaller_images_the_mean_is_over_all_and_larger_ones_are_refused():
    model = course_network().eval()
    images = torch.randn(2, 1, 16, 16)
    with torch.no_grad():
        features = model.groups(model.stem(images))
        torch.testing.assert_close(model(images), model.classifier(features.mean(dim=(2, 3))))
        assert model(torch.randn(1, 1, 55, 55)).shape == (1, 10)
        with pytest.raises(ValueError, match=r"more than 55 pixels a side \(set a smaller data.image_size\)"):
            model(torch.randn(1, 1, 56, 56))


def test_nothing_comes_after_the_sum_of_branch_and_shortcut():
    block = WideBlock("batch", 4, 6, 0.0, is_first=True).eval()
    x = torch.randn(2, 4, 8, 8)
    out = block(x)
    assert torch.equal(out, block.branch(x) + F.conv2d(x, block.shortcut.weight, block.shortcut.bias))
    assert (out < 0).any()


def test_zero_init_residual_is_refused_as_a_relu_ends_the_branches():
    with pytest.raises(RecipeError, match=r"^model\.zero_init_residual: true has no effect on wideresnet_course "):
        course_network(zero_init_residual=True)
