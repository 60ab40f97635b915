"""What sending gradients keeps between steps, for a checkpoint: that a resumed run can go on with it."""

from collections.abc import Mapping
from typing import Any, Protocol, final

from torch import Tensor, nn


class CommState(Protocol):
    """What a way to send gradients keeps between steps, each rank its own."""

    @property
    def has_state(self) -> bool:
        """Whether there is such a thing."""
        ...

    def reset(self) -> None:
        """Begin anew, after passes that were no steps."""
        ...

    def num_bytes(self, model: nn.Module) -> int:
        """Return how large the tensors of all ranks will be, in bytes, but for a small part."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """Return what all ranks keep, on rank 0, and nothing on the others. Every rank must call it."""
        ...

    def values(self, model: nn.Module) -> dict[str, Any]:
        """Return the rest as values for JSON, nothing where there is none; parameters by their names in `model`."""
        ...

    def load(self, model: nn.Module, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
        """Take over what both returned, after all passes that are no steps; return a note of what is lost, if any is.

        `values` are empty where a checkpoint has none.
        """
        ...


@final
class NoCommState:
    """For what keeps nothing. `lost` is the note of a resumed run that lacks something all the same."""

    has_state = False

    def __init__(self, lost: str = "") -> None:
        self._lost = lost

    def reset(self) -> None:
        """Do nothing."""

    def num_bytes(self, model: nn.Module) -> int:
        """Return 0."""
        return 0

    def tensors(self) -> dict[str, Tensor]:
        """Return nothing."""
        return {}

    def values(self, model: nn.Module) -> dict[str, Any]:
        """Return nothing."""
        return {}

    def load(self, model: nn.Module, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
        """Leave what several ranks kept, and say so."""
        if values:
            return f"resumed without what PowerSGD had held back on {values['ranks']} ranks: one rank sends nothing"
        return self._lost
