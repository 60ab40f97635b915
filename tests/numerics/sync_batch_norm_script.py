"""Normalize parts of one batch on several ranks; run by `rank.py`, and on the whole batch by the test."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.parallel.sync_batch_norm import convert_sync_batch_norm

CPU = torch.device("cpu")
PASSES = 3


@dataclass(frozen=True)
class Case:
    """A batch norm and its images: the ranks get `sizes` of them."""

    shape: tuple[int, ...] = (8, 4, 5, 6)
    sizes: tuple[int, int] = (4, 4)
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float64
    mean: float = 3.0
    autocast: bool = False


CASES = {
    "plain": Case(),
    "unequal shares": Case(sizes=(7, 1)),
    "cumulative average": Case(options={"momentum": None}),
    "without weights": Case(options={"affine": False}),
    "without running statistics": Case(options={"track_running_stats": False}),
    "vectors": Case(shape=(8, 4)),
    "far from zero": Case(dtype=torch.float32, mean=1e4),
    "autocast": Case(dtype=torch.float32, autocast=True),
    "all in bfloat16": Case(dtype=torch.bfloat16),
}


def norm(case: Case) -> nn.Module:
    """Return the batch norm of `case`, with weights other than 1 and 0."""
    made = (nn.BatchNorm2d if len(case.shape) == 4 else nn.BatchNorm1d)(case.shape[1], **case.options).to(case.dtype)
    with torch.no_grad():
        for number, parameter in enumerate(made.parameters()):
            parameter.copy_(torch.linspace(0.5, 1.5, case.shape[1]) + number)
    return made


def batch(case: Case, number: int) -> tuple[Tensor, Tensor]:
    """Return images of `case.shape`, channels-last if there are pixels, and the gradient of the output."""
    generator = torch.Generator().manual_seed(number)
    images, grad = torch.randn(2, *case.shape, dtype=torch.float64, generator=generator)
    layout = torch.channels_last if len(case.shape) == 4 else torch.contiguous_format
    images = (images * torch.linspace(1, 2, len(images)).view(-1, *[1] * (len(case.shape) - 1)) + case.mean).to(
        torch.bfloat16 if case.autocast else case.dtype, memory_format=layout
    )
    return images, grad.to(images.dtype, memory_format=layout)


def normalised(case: Case, layer: nn.Module, share: slice, *, is_exact: bool = False) -> dict[str, Tensor]:
    """Return outputs and gradients of a few passes over a share of each batch, then of an evaluation, and the state.

    Exact references are computed from the same numbers in float64.
    """
    wide = torch.float64 if is_exact else None
    layer.to(wide)
    tensors: dict[str, Tensor] = {}
    for number in range(PASSES):
        images, grad = (each[share].to(wide) for each in batch(case, number))
        images.requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast and not is_exact):
            output = layer(images)
        output.backward(grad)
        assert output.stride() == images.stride() and output.dtype == images.dtype
        tensors |= {f"output{number}": output, f"images.grad{number}": images.grad}
    layer.eval()
    with torch.inference_mode():
        # In evaluation, ranks may do different numbers of passes.
        for _ in range(1 + share.start):
            evaluated = layer(batch(case, 99)[0].to(wide))
    tensors |= {"evaluated": evaluated.clone(), **{name: tensor.clone() for name, tensor in layer.state_dict().items()}}
    return tensors | {f"{name}.grad": each.grad for name, each in layer.named_parameters()}


def run(rank: int, world_size: int, folder: Path) -> dict[str, Tensor]:
    tensors = {}
    for name, case in CASES.items():
        start = sum(case.sizes[:rank])
        layer = convert_sync_batch_norm(norm(case), CPU)
        results = normalised(case, layer, slice(start, start + case.sizes[rank]))
        tensors |= {f"{name}/{key}": tensor for key, tensor in results.items()}
    return tensors
