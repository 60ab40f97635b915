"""Check whether this rank's own gradient is finite, before it is averaged."""

import torch
from torch import Tensor, nn


class GradientProbe:
    """Check the gradient of the first trainable layer, where backward ends.

    A NaN or infinity propagates to the layers before it, so one small tensor per step suffices. FSDP keeps that tensor
    to itself: there the probe sees nothing.
    """

    def __init__(self, model: nn.Module) -> None:
        first = next(parameter for parameter in model.parameters() if parameter.requires_grad)
        self._is_finite = torch.ones((), device=first.device)
        first.register_hook(self._check_gradient)  # type: ignore[no-untyped-call]

    def _check_gradient(self, gradient: Tensor) -> None:
        self._is_finite = self._is_finite * torch.isfinite(gradient.detach()).all()

    def pop_is_finite(self) -> Tensor:
        """Return float32 []: 1 if all gradients since the last call were finite, else 0. Reset the flag."""
        seen = self._is_finite
        self._is_finite = torch.ones_like(seen)
        return seen
