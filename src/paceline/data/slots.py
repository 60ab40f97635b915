"""Reusable host memory for batches."""

import weakref
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class HostBuffers(Protocol):
    """Allocate host memory."""

    def allocate(self, shape: tuple[int, ...]) -> Tensor:
        """Return uninitialized uint8 of `shape`, exclusive to the caller while any tensor over it is referenced."""
        ...


class PageableHostBuffers:
    """Allocate pageable memory, and reuse it once no batch references it; too small blocks are freed.

    `num_bytes` is the total in use and free.
    """

    # The kernel zeroes fresh memory page by page, which costs a sixth of decoding into it.
    def __init__(self) -> None:
        self._free: list[NDArray[np.uint8]] = []
        self._in_use: list[tuple[weakref.ref[NDArray[np.uint8]], NDArray[np.uint8]]] = []
        self.num_bytes = 0

    def allocate(self, shape: tuple[int, ...]) -> Tensor:
        """Return uint8 of `shape`."""
        self._reclaim()
        num_bytes = int(np.prod(shape))
        memory = self._get_memory(num_bytes)
        view = memory[:num_bytes].reshape(shape)
        # Every tensor over the memory references this view, so the view dies with the last of them.
        self._in_use.append((weakref.ref(view), memory))
        return torch.from_numpy(view)

    def _reclaim(self) -> None:
        still_lent = [(view, memory) for view, memory in self._in_use if view() is not None]
        if len(still_lent) < len(self._in_use):
            self._free += [memory for view, memory in self._in_use if view() is None]
            self._in_use = still_lent

    def _get_memory(self, num_bytes: int) -> NDArray[np.uint8]:
        while self._free:
            memory = self._free.pop()
            if memory.nbytes >= num_bytes:
                return memory
            self.num_bytes -= memory.nbytes
        self.num_bytes += num_bytes
        return np.empty(num_bytes, dtype=np.uint8)


class PinnedHostBuffers:
    """Allocate page-locked memory from torch's caching allocator, which waits for device copies before reuse."""

    def allocate(self, shape: tuple[int, ...]) -> Tensor:
        """Return uint8 of `shape`."""
        return torch.empty(shape, dtype=torch.uint8, pin_memory=True)


def build_host_buffers(*, pin_memory: bool) -> HostBuffers:
    """Build an allocator of page-locked or pageable memory."""
    return PinnedHostBuffers() if pin_memory else PageableHostBuffers()
