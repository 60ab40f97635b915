"""Host memory for batches that are made in place, used again once nobody holds the batch.

Fresh memory is handed over by the kernel page by page, each zeroed: a sixth of what decoding into it costs.
"""

import weakref
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Slots(Protocol):
    """Lend memory."""

    def take(self, shape: tuple[int, ...]) -> Tensor:
        """Return uint8 of `shape`, its values undefined: the holder's for as long as a tensor over it is held."""
        ...


class PagedSlots:
    """Lend ordinary memory; what comes back is lent again where it is large enough, and else freed.

    `num_bytes` is how much there is, lent and free.
    """

    def __init__(self) -> None:
        self._free: list[NDArray[np.uint8]] = []
        self._lent: list[tuple[weakref.ref[NDArray[np.uint8]], NDArray[np.uint8]]] = []
        self.num_bytes = 0

    def take(self, shape: tuple[int, ...]) -> Tensor:
        """Return uint8 of `shape`."""
        self._collect()
        num_bytes = int(np.prod(shape))
        memory = self._found(num_bytes)
        view = memory[:num_bytes].reshape(shape)
        # Every tensor over the memory holds this view; when the last is gone, so is the view.
        self._lent.append((weakref.ref(view), memory))
        return torch.from_numpy(view)

    def _collect(self) -> None:
        """Have back what nobody holds any more."""
        still_lent = [(view, memory) for view, memory in self._lent if view() is not None]
        if len(still_lent) < len(self._lent):
            self._free += [memory for view, memory in self._lent if view() is None]
            self._lent = still_lent

    def _found(self, num_bytes: int) -> NDArray[np.uint8]:
        while self._free:
            memory = self._free.pop()
            if memory.nbytes >= num_bytes:
                return memory
            self.num_bytes -= memory.nbytes
        self.num_bytes += num_bytes
        return np.empty(num_bytes, dtype=np.uint8)


class PinnedSlots:
    """Lend page-locked memory. torch's allocator keeps it, and waits for copies to the device before it lends again."""

    def take(self, shape: tuple[int, ...]) -> Tensor:
        """Return uint8 of `shape`."""
        return torch.empty(shape, dtype=torch.uint8, pin_memory=True)


def build_slots(*, pin_memory: bool) -> Slots:
    """Return what lends page-locked memory, or ordinary memory."""
    return PinnedSlots() if pin_memory else PagedSlots()
