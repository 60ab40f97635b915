"""A look at where backward ends: was this rank's own gradient finite?"""

import torch
from torch import Tensor, nn


class Probe:
    """Whether a rank's own gradient is finite, seen where backward ends: at the first layer that learns.

    A NaN or an infinity in a gradient reaches the layers before it, so one small tensor a step tells. Where the
    strategy keeps that tensor to itself, as FSDP does, it stays unseen.
    """

    def __init__(self, model: nn.Module) -> None:
        first = next(parameter for parameter in model.parameters() if parameter.requires_grad)
        self._is_finite = torch.ones((), device=first.device)
        first.register_hook(self._see)  # type: ignore[no-untyped-call]

    def _see(self, gradient: Tensor) -> None:
        self._is_finite = self._is_finite * torch.isfinite(gradient.detach()).all()

    def take(self) -> Tensor:
        """Return float32 [], 1 while all gradients since the last call were finite, else 0."""
        seen = self._is_finite
        self._is_finite = torch.ones_like(seen)
        return seen
