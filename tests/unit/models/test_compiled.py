"""What compiled steps keep in memory: models of which it is known by hand."""

import pytest
import torch
from torch import Tensor, nn

from paceline.measure.memory import StorageCounter
from paceline.models.compiled import CompiledModel, trace_compiled
from paceline.models.meta_gpu import MetaGpu

IMAGES = 64


def count(model: nn.Module, channels: int, side: int, precision: torch.dtype | None = None) -> tuple[int, int, int]:
    """Return the bytes that are kept after forward, and at the peaks of forward and of backward, without weights."""
    model = model.to("meta")
    compiled = CompiledModel(model, trace_compiled(model, (channels, side, side), precision, MetaGpu()))
    images = torch.empty(IMAGES, channels, side, side, device="meta")
    with StorageCounter(device_type="meta") as counter:
        logits = compiled(images)
        kept, forward_peak = counter.kept, counter.peak
        counter.reset_peak()
        loss = logits.sum()
        del logits
        loss.backward()
    return kept, forward_peak, counter.peak


class Pointwise(nn.Module):
    """Activations of 16 numbers per image, between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.first(images.flatten(1))
        return self.last(hidden * torch.sigmoid(1.702 * hidden))


def test_what_a_product_reads_and_writes_is_kept_and_the_rest_computed_again() -> None:
    kept, forward_peak, _ = count(Pointwise(), 1, 4)
    result, logits = 4 * 16 * IMAGES, 4 * 8 * IMAGES
    assert kept == forward_peak == 2 * result + logits

    with StorageCounter(device_type="meta") as counter:
        output = Pointwise().to("meta")(torch.empty(IMAGES, 1, 4, 4, device="meta"))
        assert counter.kept >= 3 * result + logits  # eager code keeps the sigmoid, too
    del output


def test_of_a_convolution_and_a_norm_their_results_are_kept() -> None:
    layers = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3, bias=False)
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))
    kept, _, _ = count(model, 3, 16)
    convolved = activated = 4 * 8 * 16 * 16 * IMAGES
    assert convolved + activated < kept < 1.01 * (convolved + activated)


def test_backward_of_a_chain_reuses_what_it_has_read() -> None:
    """Of each layer backward has the gradients of its result and of its input, in the place of what was saved."""
    layers = [module for _ in range(6) for module in (nn.Linear(64, 64, bias=False), nn.GELU())]
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 64, bias=False), *layers, nn.Linear(64, 2))
    kept, _, peak = count(model, 1, 4)
    result = 4 * 64 * IMAGES
    weights = 4 * sum(each.numel() for each in model.parameters())
    assert kept == pytest.approx(13 * result, abs=4 * 3 * IMAGES)  # products and activations
    assert peak <= kept + 3 * result + weights // 12


def test_dropout_keeps_a_mask_of_one_byte() -> None:
    layers = nn.Linear(16, 16, bias=False), nn.Sigmoid(), nn.Dropout(0.1), nn.Linear(16, 8, bias=False)
    kept, _, _ = count(nn.Sequential(nn.Flatten(), *layers), 1, 4)
    result, mask, logits = 4 * 16 * IMAGES, 16 * IMAGES, 4 * 8 * IMAGES
    assert kept == 2 * result + mask + logits


def test_gradients_keep_the_format_of_weights_and_wait_for_the_end() -> None:
    """Under autocast gradients are in 16 bits while backward runs."""
    torch.manual_seed(0)
    layers = [nn.Linear(256, 256, bias=False) for _ in range(8)]
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 256, bias=False), *layers)
    *_, peak = count(model, 1, 4, torch.bfloat16)
    weights = sum(each.numel() for each in model.parameters())
    assert 4 * weights <= peak < 4.6 * weights  # and not 4 for each weight beside 2 for all others
    assert all(each.grad is not None and each.grad.dtype == torch.float32 for each in model.parameters())


def test_a_frozen_layer_has_no_gradient() -> None:
    model = Pointwise()
    model.first.requires_grad_(False)
    count(model, 1, 4)
    assert model.first.weight.grad is None and model.last.weight.grad is not None


@pytest.mark.parametrize("number", [2, 509])
def test_what_cannot_be_told_from_a_batch_or_is_no_logits_is_refused(number: int) -> None:
    class Pair(Pointwise):
        def forward(self, images: Tensor) -> Tensor:
            logits = super().forward(images)
            return (logits, logits) if number == 2 else logits  # type: ignore[return-value]

    model = Pair()
    model.last = nn.Linear(16, number)
    with pytest.raises(ValueError, match=r"sizes that 509|one tensor"):
        count(model, 1, 4)


def test_logits_may_be_a_part_of_a_result() -> None:
    class Part(Pointwise):
        def forward(self, images: Tensor) -> Tensor:
            return super().forward(images)[:, :5]

    model = Part().to("meta")
    compiled = CompiledModel(model, trace_compiled(model, (1, 4, 4), None, MetaGpu()))
    logits = compiled(torch.empty(IMAGES, 1, 4, 4, device="meta"))
    assert logits.shape == (IMAGES, 5)


def test_a_model_that_branches_on_values_cannot_be_traced() -> None:
    class Branch(Pointwise):
        def forward(self, images: Tensor) -> Tensor:
            return super().forward(images if images.sum() > 0 else -images)

    with pytest.raises(RuntimeError):  # torch's DataDependentOutputException
        count(Branch(), 1, 4)
