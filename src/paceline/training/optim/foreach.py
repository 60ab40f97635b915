"""Per-layer tensor lists of a parameter group, for torch's foreach operations, without device synchronization."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

TensorList = list[Tensor] | tuple[Tensor, ...]
"""One tensor per layer."""


@dataclass(frozen=True)
class LayerTensors:
    """Parameters of a group that have gradients, their gradients, and optimizer states."""

    parameters: list[Tensor]
    gradients: list[Tensor]
    states: list[dict[str, Tensor]]

    def state_buffers(self, name: str) -> list[Tensor]:
        """Return the state `name` of every layer, in the parameter's layout, initially zero."""
        for parameter, state in zip(self.parameters, self.states, strict=True):
            if name not in state:
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return [state[name] for state in self.states]


def layers_with_gradients(optimizer: torch.optim.Optimizer) -> Iterator[tuple[dict[str, Any], LayerTensors]]:
    """Yield every group that has gradients, with its layers."""
    for group in optimizer.param_groups:
        moving = [parameter for parameter in group["params"] if parameter.grad is not None]
        if moving:
            yield (
                group,
                LayerTensors(moving, [each.grad for each in moving], [optimizer.state[each] for each in moving]),
            )


def l2_norms(tensors: list[Tensor]) -> Tensor:
    """Return the L2 norms [L] of L tensors in at least float32; of sharded tensors, those of the whole ones."""
    # Squares of 16-bit numbers overflow or underflow; DTensor does not support the `dtype` argument.
    wide = [tensor.float() if tensor.dtype.itemsize < 4 else tensor for tensor in tensors]
    stacked = torch.stack(torch._foreach_norm(wide))
    return stacked.full_tensor() if isinstance(stacked, DTensor) else stacked


def add_scaled(tensors: TensorList, others: TensorList, factor: float | Tensor) -> None:
    """Add `factor` times `others` to `tensors` in place."""
    # torch's `alpha` is a host number; a tensor [] on the device, for captured steps, takes one more pass and rounding.
    if isinstance(factor, Tensor):
        torch._foreach_add_(tensors, torch._foreach_mul(others, factor))
    else:
        torch._foreach_add_(tensors, others, alpha=factor)


def scalar_like(parameter: Tensor, value: float) -> Tensor:
    """Return `value` as a tensor [] on the parameter's device, in at least float32."""
    # bfloat16 cannot count beyond 256.
    return torch.full((), value, dtype=torch.promote_types(parameter.dtype, torch.float32), device=parameter.device)
