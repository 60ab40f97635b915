"""Restore BatchNorm buffers after a skipped step."""

from typing import Protocol

import torch
from torch import nn

from paceline.recipe.schema.train import Train


class BufferRollback(Protocol):
    """Restore buffers that a forward pass changed, such as BatchNorm's running statistics."""

    def save(self) -> None:
        """Save the buffers after a good step."""
        ...

    def restore(self) -> None:
        """Restore the saved buffers."""
        ...


class NoRollback:
    """Do nothing: the run ends at a non-finite step."""

    def save(self) -> None:
        """Do nothing."""

    def restore(self) -> None:
        """Do nothing."""


class SavedBuffers:
    """A copy of all non-empty buffers."""

    def __init__(self, model: nn.Module) -> None:
        self._buffers = [buffer for buffer in model.buffers() if buffer.numel()]
        self._saved = [buffer.detach().clone() for buffer in self._buffers]

    @torch.no_grad()
    def save(self) -> None:
        """Save the buffers."""
        if self._saved:
            torch._foreach_copy_(self._saved, self._buffers)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the buffers."""
        if self._saved:
            torch._foreach_copy_(self._buffers, self._saved)


def build_buffer_rollback(section: Train, model: nn.Module) -> BufferRollback:
    """Return the rollback that `train.on_nonfinite` needs."""
    return SavedBuffers(model) if section.on_nonfinite == "skip" else NoRollback()
