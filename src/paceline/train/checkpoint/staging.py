"""Where the tensors of a snapshot are while they are written: in host memory of their own, or where they live."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Protocol, final

import torch
from torch import Tensor

from paceline.train.checkpoint.format import Snapshot


class Staging(Protocol):
    """Make a snapshot ready to be written."""

    def take(self, snapshot: Snapshot) -> Snapshot:
        """Return what is written in place of `snapshot`; the one that was taken before is gone."""
        ...


@final
class InPlace:
    """Write the live tensors themselves, which must not change meanwhile."""

    def take(self, snapshot: Snapshot) -> Snapshot:
        """Return `snapshot`."""
        return snapshot


@final
class HostCopy:
    """Copy all into host memory, so that training can go on; the same memory every time, as fresh memory is slow.

    Measured on a CPU, 335 MB in 20 tensors: 0.025 s into memory that is in use already, 0.75 s into new memory.
    Layouts are kept as they are, so that a copy moves bytes in order; it is the writer that puts rows in order.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, str], Tensor] = {}

    def take(self, snapshot: Snapshot) -> Snapshot:
        """Return a copy on the CPU, which is complete: the device has been waited for once, at the end."""
        live = {(part, name): each for part, tensors in snapshot.tensors.items() for name, each in tensors.items()}
        self._buffers = {key: self._buffer(key, tensor) for key, tensor in live.items()}
        with torch.no_grad():
            for key, tensor in live.items():
                self._buffers[key].copy_(tensor, non_blocking=tensor.is_cuda)
        for device in {tensor.device for tensor in live.values() if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return Snapshot(self._parts(snapshot.tensors), deepcopy(dict(snapshot.values)), snapshot.judged)

    def _buffer(self, key: tuple[str, str], tensor: Tensor) -> Tensor:
        """Return memory for `tensor`, pinned for one of a GPU: only that is copied without a stop for each tensor."""
        kept = self._buffers.get(key)
        if kept is not None and kept.dtype == tensor.dtype and kept.shape == tensor.shape:
            return kept
        return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda, requires_grad=False)

    def _parts(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
        return {part: {name: self._buffers[part, name] for name in named} for part, named in tensors.items()}
