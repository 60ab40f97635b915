"""When the device reached each end of a stage, without ever waiting for it on a step.

A GPU runs behind the host, so host time says where the program was and not what the GPU did. Pairs of CUDA
events are recorded into the stream, and read some steps later, when they are complete.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, Protocol, final

from paceline.core.errors import PacelineError
from paceline.core.stages import OTHER
from paceline.measure.summary import RECENT_STEPS

Mark = Any
"""A moment on the device; only the timer that made it knows its type."""
OPTIMIZER: Final = "optimizer"
"""The stage at whose beginning a GPU is asked whether it is idle: a loop that looks at losses does so after it."""


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of stages: all counted steps together, each of the last of them, and how many left a device idle."""

    total: dict[str, float]
    recent: dict[str, tuple[float, ...]]
    num_starved: int = 0


class DeviceTimer(Protocol):
    """The device's half of a clock."""

    def begin(self, stage: str) -> Mark:
        """Return the moment at which the device will have done all that this thread queued before `stage`."""
        ...

    def charge(self, stage: str, start: Mark) -> None:
        """Add the device's time from `start` to this moment to `stage`, in the step that is open."""
        ...

    def discard_step(self) -> None:
        """Take the last charge back."""
        ...

    def end_step(self, *, counted: bool) -> None:
        """Keep what the open step charged, or drop it (warm-up)."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has done what was queued. Never called on a step."""
        ...

    def drain(self, host: StageSeconds) -> StageSeconds:
        """Wait for the device; return its seconds of each stage of `host`, which has the host's."""
        ...


def build_device_timer(device_type: str) -> DeviceTimer:
    """Return the timer of torch's current device of that type; torch is imported for `cuda` alone."""
    return CudaEventTimer.on_current_device() if device_type == "cuda" else HostOnlyTimer()


def current_device_type(device: Literal["cuda", "cpu", "auto"]) -> str:
    """Return the type of device: for `auto` cuda where there is one. Raise `PacelineError` for what is not there."""
    if device == "cpu":
        return device
    if device not in ("cuda", "auto"):
        raise PacelineError(f"device: {device!r} is not timed (use cuda, cpu or auto)")
    import torch

    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise PacelineError("device: torch sees no cuda device (use cpu or auto)")
    return "cuda" if has_cuda else "cpu"


def mean_by_stage(stages: Iterable[str], steps: Iterable[Mapping[str, float]]) -> dict[str, tuple[float, ...]]:
    """Return the seconds of each of `stages` in each of `steps`, 0 where a step had no such stage."""
    kept = tuple(steps)
    return {stage: tuple(step.get(stage, 0.0) for step in kept) for stage in stages}


@final
class HostOnlyTimer:
    """The timer of a device that never runs behind the host: device time is host time, and nothing is kept."""

    def begin(self, stage: str) -> Mark:
        """Return nothing: host time is enough."""

    def charge(self, stage: str, start: Mark) -> None:
        """Keep nothing."""

    def discard_step(self) -> None:
        """Take nothing back."""

    def end_step(self, *, counted: bool) -> None:
        """Keep nothing."""

    def synchronize(self) -> None:
        """Return at once."""

    def drain(self, host: StageSeconds) -> StageSeconds:
        """Return `host`."""
        return host


class Event(Protocol):
    """What is used of `torch.cuda.Event(enable_timing=True)`."""

    def record(self) -> None:
        """Mark the end of what is queued on the calling thread's current stream."""
        ...

    def query(self) -> bool:
        """Return whether the device has reached the mark, without waiting for it."""
        ...

    def elapsed_time(self, end_event: Any) -> float:
        """Return the milliseconds from this mark to `end_event`; both must have been reached."""
        ...


Span = tuple[str, Event, Event]


@final
class CudaEventTimer:
    """Time stages on a GPU with events that are reused; only `synchronize` and `drain` wait for it.

    `new_event` makes an event, `synchronize` waits for the device. As many events exist as were ever unread at
    once, and CUDA bounds how far a host may run ahead of its GPU. Steps are read whole and in order.
    """

    def __init__(self, new_event: Callable[[], Event], synchronize: Callable[[], None]) -> None:
        self._new_event = new_event
        self._synchronize = synchronize
        self._free: list[Event] = []
        self._step: list[Span] = []
        self._was_idle: bool | None = None  # before the optimizer of this step; None where it was not asked
        self._unread: deque[list[Span]] = deque()
        self._total_s: dict[str, float] = {}
        self._recent: deque[dict[str, float]] = deque(maxlen=RECENT_STEPS)
        self._num_starved = 0

    @classmethod
    def on_current_device(cls) -> "CudaEventTimer":
        """Return the timer of torch's current CUDA device."""
        import torch

        return cls(partial(torch.cuda.Event, enable_timing=True), torch.cuda.synchronize)

    def begin(self, stage: str) -> Mark:
        """Record an event on the calling thread's current stream and return it."""
        event = self._record()
        if stage == OPTIMIZER and self._was_idle is None and self._step:
            self._was_idle = self._step[-1][2].query()
        return event

    def charge(self, stage: str, start: Mark) -> None:
        """Add the time from `start` to what is queued by now to `stage`, in the step that is open."""
        self._step.append((stage, start, self._record()))

    def discard_step(self) -> None:
        """Take the last charge of the open step back."""
        self._release([self._step.pop()])

    def end_step(self, *, counted: bool) -> None:
        """Keep or drop the events of the open step, and read the steps that the device has passed."""
        if counted:
            self._num_starved += _is_starved(self._step) if self._was_idle is None else self._was_idle
            self._unread.append(self._step)
            self._step = []
        else:
            self._release(self._step)
            self._step.clear()
        self._was_idle = None
        while self._unread and _is_over(self._unread[0]):
            self._read_oldest()

    def synchronize(self) -> None:
        """Wait until the device has done what was queued."""
        self._synchronize()

    def drain(self, host: StageSeconds) -> StageSeconds:
        """Wait for the device once, and return the seconds of each stage that `host` has."""
        self._synchronize()
        while self._unread:
            self._read_oldest()
        total = {stage: self._total_s.get(stage, 0.0) for stage in host.total}
        return StageSeconds(total, mean_by_stage(host.total, self._recent), self._num_starved)

    def _record(self) -> Event:
        event = self._free.pop() if self._free else self._new_event()
        event.record()
        return event

    def _read_oldest(self) -> None:
        spans = self._unread.popleft()
        step_s: dict[str, float] = {}
        for stage, start, end in spans:
            step_s[stage] = step_s.get(stage, 0.0) + start.elapsed_time(end) / 1e3
        for stage, seconds in step_s.items():
            self._total_s[stage] = self._total_s.get(stage, 0.0) + seconds
        self._recent.append(step_s)
        self._release(spans)

    def _release(self, spans: Iterable[Span]) -> None:
        for _, start, end in spans:
            self._free += (start, end)


def _is_starved(spans: list[Span]) -> bool:
    """Return whether the device is done with a step without an optimizer's stage that ends now.

    An idle GPU takes microseconds to pass even an event with nothing before it, so the one that is asked is not that
    which was recorded last, at the end of `other`, but that before: `other` queues no work to speak of.
    """
    for stage, _, end in reversed(spans):
        if stage != OTHER:
            return end.query()
    return False


def _is_over(spans: list[Span]) -> bool:
    """Return whether the device has passed a step; the newest event is asked first, as it is the last to be."""
    return all(end.query() for _, _, end in reversed(spans))
