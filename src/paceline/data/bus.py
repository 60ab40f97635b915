"""The way from host memory to the device: beside what the device computes, where it has streams.

It counts what it sends, and on a GPU can time its copies there. The stage `h2d` of a clock says what a step waits for
them, which is less: they run on a stream of their own while the step before is still computed.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol

import torch
from torch import Tensor

KEPT_COPIES: Final = 1000
"""The last copies that are timed one by one: two events each."""


@dataclass(frozen=True)
class Copied:
    """What came from host memory: how often, its bytes, and those of them that were copied to another device.

    `timed_bytes` took `timed_s` seconds there, in copies that were timed; both are 0 where none were.
    """

    sends: int = 0
    bytes: int = 0
    copied_bytes: int = 0
    timed_bytes: int = 0
    timed_s: float = 0.0


class Bus(Protocol):
    """Bring tensors to a device."""

    def send(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors on the device; page-locked ones are not waited for, what is there stays as it is."""
        ...

    def copied(self, skip: int) -> Copied:
        """Return what was sent so far; of the times, those of the first `skip` sends are left out. Waits for copies."""
        ...


class Direct:
    """Copy in the order of everything else that the device is asked for; nothing at all where it is the host's own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sends = 0
        self._bytes = 0

    def send(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors on the device."""
        self._sends += 1
        self._bytes += sum(tensor.nbytes for tensor in tensors)
        return [tensor.to(self._device, non_blocking=True) for tensor in tensors]

    def copied(self, skip: int) -> Copied:
        """Return what was sent; no copy is timed."""
        return Copied(self._sends, self._bytes, 0 if self._device.type == "cpu" else self._bytes)


@dataclass
class CopyEvents:
    """The last copies of a stream, each between two of its events, which are used again when they fall out.

    `new_event` returns an event with the methods of `torch.cuda.Event(enable_timing=True)`.
    """

    new_event: Callable[[], Any]
    _kept: deque[tuple[int, int, Any, Any]] = field(default_factory=deque)

    def begin(self) -> tuple[Any, Any]:
        """Record the first of two events on the current stream; return both."""
        is_full = len(self._kept) >= KEPT_COPIES
        events = self._kept.popleft()[2:] if is_full else (self.new_event(), self.new_event())
        events[0].record()
        return events

    def end(self, events: tuple[Any, Any], number: int, num_bytes: int) -> None:
        """Record the second event: send `number`, from 1, has copied `num_bytes`."""
        events[1].record()
        self._kept.append((number, num_bytes, *events))

    def total(self, skip: int) -> tuple[int, float]:
        """Return (bytes, seconds) of the copies kept after the first `skip` sends; waits for the last of them."""
        found = [(num_bytes, start, end) for number, num_bytes, start, end in self._kept if number > skip]
        if found:
            found[-1][2].synchronize()
        return sum(each[0] for each in found), sum(start.elapsed_time(end) / 1e3 for _, start, end in found)


class SideStream:
    """Copy on a CUDA stream of its own, so that a batch comes in while the step before is still computed.

    The host is about a step ahead of the GPU (`train.guard`), which is all that takes. What is queued on the current
    stream afterwards waits for the copies. With `timed` each send is timed by two events on that stream.
    """

    def __init__(self, device: torch.device, *, timed: bool = False) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._sends = 0
        self._bytes = 0
        self._events = CopyEvents(partial(torch.cuda.Event, enable_timing=True)) if timed else None

    def send(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors on the device."""
        if all(tensor.is_cuda for tensor in tensors):
            return list(tensors)  # no word to any stream: this may be inside a capture
        num_bytes = sum(tensor.nbytes for tensor in tensors if not tensor.is_cuda)
        self._sends += 1
        self._bytes += num_bytes
        here = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            events = self._events.begin() if self._events else None
            sent = [tensor.to(self._device, non_blocking=True) for tensor in tensors]
            if self._events and events:
                self._events.end(events, self._sends, num_bytes)
        here.wait_stream(self._stream)
        for tensor, copy in zip(tensors, sent, strict=True):
            if copy is not tensor:
                copy.record_stream(here)  # its memory is lent again when what reads it here is done
        return sent

    def copied(self, skip: int) -> Copied:
        """Return what was sent, and what of it was timed."""
        timed = self._events.total(skip) if self._events else (0, 0.0)
        return Copied(self._sends, self._bytes, self._bytes, *timed)


def build_bus(device: torch.device, *, timed: bool = False) -> Bus:
    """Return the way to `device`; with `timed` its copies are timed where the device has a clock of its own."""
    return SideStream(device, timed=timed) if device.type == "cuda" else Direct(device)
