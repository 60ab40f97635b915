"""Restore BatchNorm buffers after a skipped step."""

from typing import Protocol

import torch
from torch import nn

from paceline.recipe.schema.train import Train


class Undo(Protocol):
    """Restore buffers that a forward pass changed, such as BatchNorm's running statistics."""

    def keep(self) -> None:
        """Save the buffers after a good step."""
        ...

    def back(self) -> None:
        """Restore the saved buffers."""
        ...


class NothingToUndo:
    """Do nothing: the run ends at a non-finite step."""

    def keep(self) -> None:
        """Do nothing."""

    def back(self) -> None:
        """Do nothing."""


class KeptBuffers:
    """A copy of all non-empty buffers."""

    def __init__(self, model: nn.Module) -> None:
        self._buffers = [buffer for buffer in model.buffers() if buffer.numel()]
        self._kept = [buffer.detach().clone() for buffer in self._buffers]

    @torch.no_grad()
    def keep(self) -> None:
        """Save the buffers."""
        if self._kept:
            torch._foreach_copy_(self._kept, self._buffers)

    @torch.no_grad()
    def back(self) -> None:
        """Restore the buffers."""
        if self._kept:
            torch._foreach_copy_(self._buffers, self._kept)


def build_undo(section: Train, model: nn.Module) -> Undo:
    """Return the rollback that `train.on_nonfinite` needs."""
    return KeptBuffers(model) if section.on_nonfinite == "skip" else NothingToUndo()
