"""Time the stages of steps on a GPU by events at their boundaries, without ever waiting for the GPU."""

from collections import deque
from collections.abc import Callable
from itertools import pairwise
from typing import Final, Protocol, final

MAX_UNREAD: Final = 256
"""Steps whose events may be unread; the host is never so far ahead, so older ones have an event that cannot be read."""
MAX_BOUNDARIES: Final = 4096
"""Boundaries from which a step gets no device times: a script may read values for hours without a step."""


class Event(Protocol):
    """The part of `torch.cuda.Event` in use."""

    def record(self) -> None:
        """Record the event on the current stream."""
        ...

    def query(self) -> bool:
        """Return whether the device has passed the event."""
        ...

    def elapsed_time(self, end: "Event", /) -> float:
        """Return the milliseconds from this event to `end`."""
        ...


Boundary = tuple[str, Event]
"""The stage that begins, and the moment."""


@final
class DeviceEvents:
    """Events of the open step and of those that the device has not completed."""

    def __init__(self, new_event: Callable[[], Event], is_capturing: Callable[[], bool]) -> None:
        self._new_event = new_event
        self._is_capturing = is_capturing
        self._free: list[Event] = []
        self._open: list[Boundary] = []
        self._unread: deque[tuple[int, list[Boundary]]] = deque()

    def record(self, stage: str) -> None:
        """Record on the calling thread's current stream that `stage` begins; "" is a pause."""
        if len(self._open) >= MAX_BOUNDARIES or self._is_capturing():  # the event would become a part of the graph
            return
        event = self._free.pop() if self._free else self._new_event()
        event.record()
        self._open.append((stage, event))

    @property
    def num_recorded(self) -> int:
        """Number of boundaries in the open step."""
        return len(self._open)

    def forget_since(self, num_recorded: int) -> None:
        """Drop the boundaries after the first `num_recorded` of the open step."""
        self._free += [event for _, event in self._open[num_recorded:]]
        del self._open[num_recorded:]

    def rename_since(self, num_recorded: int, stage: str, new: str) -> None:
        """Call `stage` by its new name after the first `num_recorded` boundaries of the open step."""
        self._open[num_recorded:] = [(new if each == stage else each, at) for each, at in self._open[num_recorded:]]

    def end_step(self, n: int, stage: str) -> None:
        """End step `n`, or its next part, where the next step begins with `stage`."""
        boundaries, self._open = self._open, []
        if len(boundaries) >= MAX_BOUNDARIES:
            self._free += [event for _, event in boundaries[1:]]  # the first is also the end of the step before
            boundaries = []
        if self._unread and self._unread[-1][0] == n:
            self._unread[-1][1].extend(boundaries)
        else:
            self._unread.append((n, boundaries))
        self.record(stage)
        if self._open:
            self._unread[-1][1].append(("", self._open[-1][1]))
        if len(self._unread) > MAX_UNREAD:
            self._unread.popleft()  # not reused: the device may still have to pass them

    def read_completed(self) -> list[tuple[int, dict[str, float]]]:
        """Return the seconds by stage of the steps that the device has completed, by number, each once."""
        completed: list[tuple[int, dict[str, float]]] = []
        if self._is_capturing():  # a query would break the capture
            return completed
        # The newest step may still get a second optimizer.
        while len(self._unread) > 1 and all(event.query() for _, event in reversed(self._unread[0][1])):
            n, boundaries = self._unread.popleft()
            completed.append((n, _seconds_by_stage(boundaries)))
            self._free += [event for stage, event in boundaries if stage]
        return completed


def _seconds_by_stage(boundaries: list[Boundary]) -> dict[str, float]:
    stages: dict[str, float] = {}
    for (stage, start), (_, end) in pairwise(boundaries):
        if stage:
            # Streams may pass two boundaries in the other order.
            stages[stage] = stages.get(stage, 0.0) + max(0.0, start.elapsed_time(end) / 1e3)
    return stages
