"""The clock of the host, and the timer of a stage."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import final


def now_s() -> float:
    """Return seconds since some moment of this process's host: for the time between two calls."""
    return time.perf_counter()


@final
class StageTimer:
    """Sum up the seconds of turns. A turn may begin in one thread and end in another, but turns never overlap."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self.turns = 0
        self.total_s = 0.0
        self.slowest_s = 0.0

    def begin(self) -> float:
        """Return when a turn begins, in seconds, which `end` asks for."""
        return self._now()

    def end(self, began_s: float) -> None:
        """Add the turn that began at `began_s`."""
        turn_s = self._now() - began_s
        self.total_s += turn_s
        self.slowest_s = max(self.slowest_s, turn_s)
        self.turns += 1

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Return a context that is one turn, also when it raises."""
        began_s = self.begin()
        try:
            yield
        finally:
            self.end(began_s)
