"""The host's monotonic clock, and a timer of repeated calls."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import final


def now_s() -> float:
    """Return seconds of a monotonic clock, for differences between two calls."""
    return time.perf_counter()


@final
class StageTimer:
    """Accumulate the seconds of repeated calls, which never overlap.

    A call may begin in one thread and end in another.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self.turns = 0
        self.total_s = 0.0
        self.slowest_s = 0.0

    def begin(self) -> float:
        """Return the start time of a call in seconds, to pass to `end`."""
        return self._now()

    def end(self, began_s: float) -> None:
        """Add the call that began at `began_s`."""
        turn_s = self._now() - began_s
        self.total_s += turn_s
        self.slowest_s = max(self.slowest_s, turn_s)
        self.turns += 1

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Time a `with` block as one call, even if it raises."""
        began_s = self.begin()
        try:
            yield
        finally:
            self.end(began_s)
