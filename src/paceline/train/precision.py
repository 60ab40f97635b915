"""Which number format a step computes in."""

import contextlib
from typing import Literal, Protocol

import torch
from torch import Tensor


class Precision(Protocol):
    """Surround the forward pass, run the backward pass and the optimizer's step in one number format."""

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Surround forward and loss."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of `loss`."""
        ...

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Move the parameters; return whether they moved."""
        ...


class FullPrecision:
    """Everything in float32."""

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Return a context that does nothing."""
        return contextlib.nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients."""
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Move the parameters."""
        optimizer.step()
        return True


class Bfloat16:
    """Convolutions and products in bfloat16, weights and sums in float32. Its range needs no loss scaling."""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Return torch's autocast to bfloat16."""
        return torch.autocast(self._device_type, dtype=torch.bfloat16)

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients."""
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Move the parameters."""
        optimizer.step()
        return True


def build_precision(name: Literal["fp32", "bf16"], device_type: str) -> Precision:
    """Return the precision called `name` on a kind of device."""
    match name:
        case "fp32":
            return FullPrecision()
        case "bf16":
            return Bfloat16(device_type)
