"""When the device reached each end of a stage, without ever waiting for it on a step.

A GPU runs behind the host, so host time says where the program was and not what the GPU did. Pairs of CUDA
events are recorded into the stream, and read some steps later, when they are complete.
"""

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol, final

Mark = Any
"""A moment on the device; only the timer that made it knows its type."""


class DeviceTimer(Protocol):
    """The device's half of a clock."""

    def mark(self) -> Mark:
        """Return the moment at which the device will have done all that was queued so far."""
        ...

    def charge(self, stage: str, start: Mark) -> None:
        """Add the device's time from `start` to this moment to `stage`, in the step that is open."""
        ...

    def end_step(self, *, counted: bool) -> None:
        """Keep what the open step charged, or drop it (warm-up)."""
        ...

    def settle(self) -> None:
        """Wait until the device has done what was queued. Never called on a step."""
        ...

    def drain(self, host_s: Mapping[str, float]) -> dict[str, float]:
        """Wait for the device; return the kept seconds of each stage of `host_s`, its host seconds."""
        ...


@final
class HostOnly:
    """The timer of a device that never runs behind the host: device time is host time, and nothing is kept."""

    def mark(self) -> Mark:
        """Return nothing: host time is enough."""

    def charge(self, stage: str, start: Mark) -> None:
        """Keep nothing."""

    def end_step(self, *, counted: bool) -> None:
        """Keep nothing."""

    def settle(self) -> None:
        """Return at once."""

    def drain(self, host_s: Mapping[str, float]) -> dict[str, float]:
        """Return `host_s` seconds."""
        return dict(host_s)


class Event(Protocol):
    """What is used of `torch.cuda.Event(enable_timing=True)`."""

    def record(self) -> None:
        """Mark the end of what is queued on the current stream."""
        ...

    def query(self) -> bool:
        """Return whether the device has reached the mark, without waiting for it."""
        ...

    def elapsed_time(self, end_event: Any) -> float:
        """Return the milliseconds from this mark to `end_event`; both must have been reached."""
        ...


@final
class CudaEvents:
    """Time stages on a GPU with events that are reused; only `settle` and `drain` wait for it.

    `new_event` makes an event, `synchronize` waits for the device. As many events exist as were ever unread at
    once, and CUDA bounds how far a host may run ahead of its GPU.
    """

    def __init__(self, new_event: Callable[[], Event], synchronize: Callable[[], None]) -> None:
        self._new_event = new_event
        self._synchronize = synchronize
        self._free: list[Event] = []
        self._step: list[tuple[str, Event, Event]] = []
        self._unread: deque[tuple[str, Event, Event]] = deque()
        self._total_s: dict[str, float] = {}

    @classmethod
    def on_current_device(cls) -> "CudaEvents":
        """Return the timer of torch's current CUDA device."""
        import torch

        return cls(partial(torch.cuda.Event, enable_timing=True), torch.cuda.synchronize)

    def mark(self) -> Mark:
        """Record an event on the current stream and return it."""
        event = self._free.pop() if self._free else self._new_event()
        event.record()
        return event

    def charge(self, stage: str, start: Mark) -> None:
        """Add the time from `start` to what is queued by now to `stage`, in the step that is open."""
        self._step.append((stage, start, self.mark()))

    def end_step(self, *, counted: bool) -> None:
        """Keep or drop the events of the open step, and read those that the device has passed."""
        if counted:
            self._unread.extend(self._step)
        else:
            for _, start, end in self._step:
                self._free += (start, end)
        self._step.clear()
        while self._unread and self._unread[0][2].query():
            self._read_oldest()

    def settle(self) -> None:
        """Wait until the device has done what was queued."""
        self._synchronize()

    def drain(self, host_s: Mapping[str, float]) -> dict[str, float]:
        """Wait for the device once, and return the seconds of each stage that `host_s` names."""
        self._synchronize()
        while self._unread:
            self._read_oldest()
        return {stage: self._total_s.get(stage, 0.0) for stage in host_s}

    def _read_oldest(self) -> None:
        stage, start, end = self._unread.popleft()
        self._total_s[stage] = self._total_s.get(stage, 0.0) + start.elapsed_time(end) / 1e3
        self._free += (start, end)
