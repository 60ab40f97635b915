"""Something that is to be done every so often by the clock on the wall."""

import time
from collections.abc import Callable


class IntervalTimer:
    """Ring once every `every_s` seconds, the first time that long after it was set; 0 never rings."""

    def __init__(self, every_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self._every_s = every_s
        self._now = now
        self._set_s = now()

    def is_due(self) -> bool:
        """Return whether it is time, and if so begin to wait again."""
        if not self._every_s or self._now() - self._set_s < self._every_s:
            return False
        self._set_s = self._now()
        return True
