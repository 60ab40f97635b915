"""What an optimizer sees of a parameter group: lists with one tensor a layer, for torch's foreach operations.

On a GPU such an operation takes a few kernels for all layers of a group where its lists agree in shapes and formats.
Where one list has a number [] for each layer, as a ratio of norms or a denominator is, torch goes through the layers
one by one, a kernel each. Nothing here asks for a tensor's value, so the host never waits for one. How the layers are
moved is each optimizer's own affair.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

Tensors = list[Tensor] | tuple[Tensor, ...]
"""One tensor a layer, as torch's foreach operations take and return them."""


@dataclass(frozen=True)
class Layers:
    """The parameters of a group that have a gradient, their gradients, and what the optimizer keeps for each."""

    parameters: list[Tensor]
    gradients: list[Tensor]
    states: list[dict[str, Tensor]]

    def buffers(self, name: str) -> list[Tensor]:
        """Return the state called `name` of every layer, laid out like the parameter; it starts at zero."""
        for parameter, state in zip(self.parameters, self.states, strict=True):
            if name not in state:
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return [state[name] for state in self.states]


def moving_layers(optimizer: torch.optim.Optimizer) -> Iterator[tuple[dict[str, Any], Layers]]:
    """Yield every group in which something has a gradient, with its layers."""
    for group in optimizer.param_groups:
        moving = [parameter for parameter in group["params"] if parameter.grad is not None]
        if moving:
            yield group, Layers(moving, [each.grad for each in moving], [optimizer.state[each] for each in moving])


def norms(tensors: list[Tensor]) -> Tensor:
    """Return the L2 norm of each of L tensors, [L] in float32 at least; of a sharded tensor, that of the whole."""
    # Squares of 16-bit numbers overflow or are rounded away; shards do not know the argument for another format.
    wide = [tensor.float() if tensor.dtype.itemsize < 4 else tensor for tensor in tensors]
    found = torch.stack(torch._foreach_norm(wide))
    return found.full_tensor() if isinstance(found, DTensor) else found


def add_scaled(tensors: Tensors, others: Tensors, factor: float | Tensor) -> None:
    """Add `factor` times `others` to `tensors` in place; a factor that is a tensor [] is read by the device alone.

    Such a one takes a pass more, and rounds once more: torch's own `alpha` is a number that the host must know.
    """
    if isinstance(factor, Tensor):
        torch._foreach_add_(tensors, torch._foreach_mul(others, factor))
    else:
        torch._foreach_add_(tensors, others, alpha=factor)


def number(parameter: Tensor, value: float) -> Tensor:
    """Return `value` as a tensor [] beside `parameter`, in float32 at least: a count in 16 bits ends at 256."""
    return torch.full((), value, dtype=torch.promote_types(parameter.dtype, torch.float32), device=parameter.device)


def restore_numbers(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Give the tensors [] of a loaded `state_dict` their own format back: torch rounds them to the parameters'."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, values in state_dict["state"].items():
        for name, value in values.items():
            if value.ndim == 0:
                optimizer.state[parameters[index]][name] = value.to(parameters[index].device, copy=True)
