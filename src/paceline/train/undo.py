"""What a skipped step takes back: the buffers that its forward pass has moved."""

from typing import Protocol

import torch
from torch import nn

from paceline.recipe.schema.train import Train


class Undo(Protocol):
    """Take back what a forward pass has left in a model's buffers, such as the running statistics of batch norm."""

    def keep(self) -> None:
        """Remember the buffers after a good step."""
        ...

    def back(self) -> None:
        """Put back what was remembered."""
        ...


class NothingToUndo:
    """For guards that end the run: what the step has left is never used."""

    def keep(self) -> None:
        """Remember nothing."""

    def back(self) -> None:
        """Do nothing."""


class KeptBuffers:
    """A copy of the buffers that hold numbers, renewed after each good step."""

    def __init__(self, model: nn.Module) -> None:
        self._buffers = [buffer for buffer in model.buffers() if buffer.numel()]
        self._kept = [buffer.detach().clone() for buffer in self._buffers]

    @torch.no_grad()
    def keep(self) -> None:
        """Copy the buffers."""
        if self._kept:
            torch._foreach_copy_(self._kept, self._buffers)

    @torch.no_grad()
    def back(self) -> None:
        """Copy them back."""
        if self._kept:
            torch._foreach_copy_(self._buffers, self._kept)


def build_undo(section: Train, model: nn.Module) -> Undo:
    """Return what undoes a skipped step, where steps are skipped for what their forward pass met."""
    return KeptBuffers(model) if section.on_nonfinite == "skip" else NothingToUndo()
