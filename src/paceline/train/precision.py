"""Which number format a step computes in."""

import contextlib
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor


class Precision(Protocol):
    """Surround the forward pass, run the backward pass and the optimizer's step in one number format."""

    @property
    def dtype(self) -> torch.dtype:
        """The type of weights and images."""
        ...

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Surround forward and loss."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of `loss`."""
        ...

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Move the parameters; return whether they moved."""
        ...


@dataclass(frozen=True)
class FullPrecision:
    """Everything in one type: float32, or float64 where rounding must not hide or look like a difference."""

    dtype: torch.dtype = torch.float32

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

    dtype = torch.float32

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


def build_precision(name: Literal["fp64", "fp32", "bf16"], device_type: str) -> Precision:
    """Return the precision called `name` on a kind of device."""
    match name:
        case "fp64":
            return FullPrecision(torch.float64)
        case "fp32":
            return FullPrecision()
        case "bf16":
            return Bfloat16(device_type)
