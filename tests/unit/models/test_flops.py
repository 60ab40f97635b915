"""FLOPs, parameters and traffic of models, against counts by hand and by other tools."""

import pytest
import torch
from torch import Tensor, nn

from paceline.models.build import build_model
from paceline.models.flops import Kernel, KernelCost, ModelCost, StepKernels, count_cost, count_kernels
from paceline.recipe.schema.model import Model


class Residual(nn.Module):
    """A stem, one residual branch, and a classifier: 8 channels all through."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.conv = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.classifier = nn.Linear(8, 5)

    def forward(self, images: Tensor) -> Tensor:
        stem = self.stem(images)
        return self.classifier((stem + torch.relu(self.norm(self.conv(stem)))).mean(dim=(2, 3)))


def cost_in(name: str, size: int, *, channels: int = 3, num_classes: int = 1000) -> ModelCost:
    with torch.device("meta"):  # which draws no weights
        model = build_model(Model(name=name), num_classes=num_classes, channels=channels)
    return count_cost(model, channels, size, size)


def flops_of(kernels: tuple[KernelCost, ...]) -> float:
    return sum(kernel.flops for kernel in kernels)


def test_every_kernel_of_a_small_network_is_as_counted_by_hand() -> None:
    cost = count_cost(Residual(), 3, 4, 4)

    image, maps = 3 * 16, 8 * 16
    stem, conv = 2 * maps * 3 * 9, 2 * maps * 8 * 9
    forward = (
        KernelCost(stem, image + maps),
        KernelCost(conv, 2 * maps),
        KernelCost(0, 3 * maps),  # the norm reads for its statistics, reads again and writes
        KernelCost(0, maps),  # the sum reads the other operand, and ReLU nothing
        KernelCost(0, maps + 8),  # the mean
        KernelCost(2 * 8 * 5, 8 + 5),
    )
    backward = [
        KernelCost(2 * 8 * 5, 5 + 8),  # of the classifier's input
        KernelCost(2 * 8 * 5, 5 + 8),  # of its weights
        KernelCost(0, 5),  # of its bias
        KernelCost(0, 5 * maps),  # the norm reads two, reads two again and writes
        KernelCost(conv, 2 * maps),
        KernelCost(conv, 2 * maps),
        KernelCost(0, maps),  # both branches' gradients meet
        KernelCost(stem, image + maps),  # of the weights; the image needs no gradient
    ]
    assert cost.params == 3 * 8 * 9 + 8 * 8 * 9 + 16 + 45
    assert cost.forward == forward
    assert sorted(cost.training[len(forward) :]) == sorted(backward)


# Parameters in millions, GFLOP an image forward and in training, by torch's counter over whole networks; and what a
# compiler would have them move in bf16, worked out from their layers.
COUNTED = {
    ("resnet50_nersc", 32, 3, 100): (23.71, 2.612, 7.816),
    ("resnet18_cifar", 32, 3, 100): (11.22, 1.111, 3.329),
    ("wideresnet_course", 28, 1, 10): (17.12, 3.693, 11.079),
    ("speednet94", 32, 3, 10): (1.97, 0.236, 0.708),
    ("torchvision:resnet50", 224, 3, 1000): (25.56, 8.178, 24.299),
}
MOVED_MB = {"resnet50_nersc": 103, "resnet18_cifar": 18, "torchvision:resnet50": 333}


@pytest.mark.parametrize("network", COUNTED, ids=lambda network: network[0])
def test_networks_cost_what_others_have_counted(network: tuple[str, int, int, int]) -> None:
    name, size, channels, num_classes = network

    cost = cost_in(name, size, channels=channels, num_classes=num_classes)

    counted = (cost.params / 1e6, flops_of(cost.forward) / 1e9, cost.training_flops / 1e9)
    assert tuple(f"{value:.{digits}f}" for value, digits in zip(counted, (2, 3, 3), strict=True)) == tuple(
        f"{value:.{digits}f}" for value, digits in zip(COUNTED[network], (2, 3, 3), strict=True)
    )
    if name in MOVED_MB:
        # Within 3 %: those figures are of two or three digits, and leave pooling and the classifier out.
        assert 2 * sum(kernel.elements for kernel in cost.training) / 1e6 == pytest.approx(MOVED_MB[name], rel=0.03)


def test_a_grouped_convolution_costs_as_much_backward_as_forward_twice() -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Flatten())

    cost = count_cost(model, 8, 4, 4)

    pointwise, depthwise = 2 * 8 * 16 * 8, 2 * 8 * 16 * 9
    assert flops_of(cost.forward) == pointwise + depthwise
    assert cost.training_flops == 2 * pointwise + 3 * depthwise


def test_a_transposed_convolution_counts_what_it_reads() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 1), nn.ConvTranspose2d(4, 2, 2, stride=2), nn.Flatten())

    cost = count_cost(model, 4, 3, 3)

    pointwise, transposed = 2 * 4 * 9 * 4, 2 * 4 * 9 * 2 * 4
    assert flops_of(cost.forward) == pointwise + transposed
    assert cost.training_flops == 2 * pointwise + 3 * transposed


def test_attention_is_counted_as_its_two_products() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(6, 6, bias=False)

        def forward(self, images: Tensor) -> Tensor:
            tokens = self.project(images)
            return nn.functional.scaled_dot_product_attention(tokens, tokens, tokens).flatten(1)

    cost = count_cost(Attention(), 2, 5, 6)  # 2 heads, 5 tokens of 6 numbers

    assert flops_of(cost.forward) == 2 * 2 * 5 * 6 * 6 + 2 * (2 * 2 * 5 * 5 * 6)
    assert cost.training_flops >= 2 * (2 * 2 * 5 * 6 * 6) + 3 * 2 * (2 * 2 * 5 * 5 * 6)


def test_a_probe_without_a_network_still_has_a_cost() -> None:
    cost = cost_in("empty", 32, num_classes=10)

    assert (cost.params, flops_of(cost.forward), cost.training_flops) == (40, 60, 120)


def test_counting_leaves_the_model_and_the_random_numbers_alone() -> None:
    model = Residual().eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.random.get_rng_state()

    count_cost(model, 3, 4, 4)

    assert not model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.random.get_rng_state(), state)


class Tokens(nn.Module):
    """Attention of 2 heads over rows of an image of 2 channels, 5 x 6 pixels, between two products."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.project = nn.Linear(6, 6, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.project(self.norm(images))
        return self.project(nn.functional.scaled_dot_product_attention(tokens, tokens, tokens)).flatten(1)


def test_a_kernel_has_a_class_the_bytes_it_moves_and_the_sides_of_its_product() -> None:
    step = count_kernels(Residual(), 3, 4, 4)

    image, maps, number = 3 * 16, 8 * 16, 4
    flops, weights = 2 * maps * 8 * 9, number * 8 * 8 * 9
    convolution = Kernel("convolution", flops, number * 2 * maps, weights, (8, 72))
    assert step.forward[:4] == (
        Kernel("convolution", 2 * maps * 3 * 9, number * (image + maps), number * 8 * 3 * 9, (8, 27)),
        convolution,
        Kernel("elementwise", 0, 0, 2 * 8, ()),  # the norm counts its batches
        Kernel("batch_norm", 0, number * 3 * maps, 0, ()),
    )
    assert convolution in step.backward
    assert convolution._replace(kind="convolution_weights") in step.backward
    assert (step.params, step.tensors) == (3 * 8 * 9 + 8 * 8 * 9 + 16 + 45, 6)


def test_frozen_parameters_are_told_apart() -> None:
    model = Tokens()
    model.norm.requires_grad_(False)

    step = count_kernels(model, 2, 5, 6)

    assert (step.params, step.tensors) == (12 + 36, 3)
    assert (step.trained_params, step.trained_tensors) == (36, 1)


def test_groups_of_one_channel_are_depthwise_and_others_grouped() -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 16, 3, groups=2), nn.Flatten())

    step = count_kernels(model, 8, 8, 8)

    kinds = [kernel.kind for kernel in step.forward]
    assert kinds == ["convolution", "depthwise", "grouped"]
    assert step.forward[2].sides == (8, 36)
    assert {"depthwise_weights", "grouped_weights", "convolution_weights"} <= {each.kind for each in step.backward}


def test_autocast_halves_products_and_keeps_norms_in_full() -> None:
    full = count_kernels(Tokens(), 2, 5, 6)
    half = count_kernels(Tokens(), 2, 5, 6, autocast=torch.float16)

    def kernels(step: StepKernels, kind: str) -> list[Kernel]:
        return [each for each in (*step.forward, *step.backward) if each.kind == kind]

    assert len(kernels(full, "product")) == len(kernels(half, "product")) == 6
    for kind in ("product", "attention"):
        assert [each.flops for each in kernels(full, kind)] == [each.flops for each in kernels(half, kind)]
    assert sum(each.num_bytes for each in kernels(full, "product")) == 2 * sum(
        each.num_bytes for each in kernels(half, "product")
    )
    assert kernels(full, "row_norm") == kernels(half, "row_norm")
    assert len(kernels(half, "copy")) > len(kernels(full, "copy"))


class TorchAttention(nn.Module):
    """Torch's own attention over rows of an image of 1 channel, 5 x 6 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, images: Tensor) -> Tensor:
        tokens = images.flatten(1, 2)
        attended: Tensor = self.attention(tokens, tokens, tokens, need_weights=False)[0]
        return attended.flatten(1)


def test_autocast_halves_the_products_of_torchs_own_attention() -> None:
    def product_bytes(autocast: torch.dtype | None) -> float:
        step = count_kernels(TorchAttention(), 1, 5, 6, autocast=autocast)
        products = [each for each in (*step.forward, *step.backward) if each.kind == "product"]
        assert products
        return sum(each.num_bytes for each in products)

    assert product_bytes(None) == 2 * product_bytes(torch.float16)


@pytest.mark.parametrize(("network", "channels"), [(Tokens, 2), (TorchAttention, 1)])
def test_fused_attention_moves_no_scores(network: type[nn.Module], channels: int) -> None:
    fused = count_kernels(network(), channels, 5, 6)
    apart = count_kernels(network(), channels, 5, 6, fused_attention=False)

    assert sum(each.kind == "attention" for each in fused.forward) == 1
    assert sum(each.kind == "attention" for each in apart.forward) == 2
    assert sum(each.flops for each in fused.forward) == sum(each.flops for each in apart.forward)


def test_inference_has_no_backward_and_reads_each_norm_once() -> None:
    step = count_kernels(Residual().train(), 3, 4, 4, training=False)

    assert step.backward == ()
    (norm,) = (each for each in step.forward if each.kind == "batch_norm")
    assert norm.num_bytes == 4 * 2 * 8 * 16
