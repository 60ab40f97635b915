"""The way from host memory to the device: beside what the device computes, where it has streams."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Bus(Protocol):
    """Bring tensors to a device."""

    def send(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors on the device; page-locked ones are not waited for, what is there stays as it is."""
        ...


class Direct:
    """Copy in the order of everything else that the device is asked for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def send(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors on the device."""
        return [tensor.to(self._device, non_blocking=True) for tensor in tensors]


class SideStream:
    """Copy on a CUDA stream of its own, so that a batch comes in while the step before is still computed.

    The host is about a step ahead of the GPU (`train.guard`), which is all that takes. What is queued on the current
    stream afterwards waits for the copies.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def send(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors on the device."""
        if all(tensor.is_cuda for tensor in tensors):
            return list(tensors)  # no word to any stream: this may be inside a capture
        here = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            sent = [tensor.to(self._device, non_blocking=True) for tensor in tensors]
        here.wait_stream(self._stream)
        for tensor, copy in zip(tensors, sent, strict=True):
            if copy is not tensor:
                copy.record_stream(here)  # its memory is lent again when what reads it here is done
        return sent


def build_bus(device: torch.device) -> Bus:
    """Return the way to `device`."""
    return SideStream(device) if device.type == "cuda" else Direct(device)
