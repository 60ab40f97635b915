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


def test_a_model_that_branches_on_values_cannot_be_traced() -> None:
    class Branch(Pointwise):
        def forward(self, images: Tensor) -> Tensor:
            return super().forward(images if images.sum() > 0 else -images)

    with pytest.raises(RuntimeError):  # torch's DataDependentOutputException
        count(Branch(), 1, 4)
