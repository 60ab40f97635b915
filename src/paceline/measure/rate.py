"""How long a run has trained, and how fast it is going right now: for logs and progress, not for claims."""

import time
from collections.abc import Callable

from paceline.measure.timing import now_s


def unix_s() -> float:
    """Return seconds since 1970: for what is compared between processes. A host's clock may be set meanwhile."""
    return time.time()


def steady_unix_s() -> Callable[[], float]:
    """Return a clock of seconds since 1970 that is read once and does not follow when the host's clock is set."""
    began_s = unix_s() - now_s()
    return lambda: began_s + now_s()


class Stopwatch:
    """Seconds of training, `before_s` of earlier processes included, and images/s since the last look.

    Evaluations count as training time here (they are part of what a user waits for), but not in the rate.
    """

    def __init__(self, before_s: float = 0.0, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._before_s = before_s
        self.started_s = now()
        self._looked = self.started_s
        self._images = 0

    @property
    def elapsed_s(self) -> float:
        """Seconds of training so far, earlier processes included."""
        return self._before_s + self.here_s

    @property
    def here_s(self) -> float:
        """Seconds of training in this process."""
        return self._now() - self.started_s

    def add(self, images: int) -> None:
        """Count images of all ranks as trained."""
        self._images += images

    def rate(self) -> float:
        """Return images/s since the last look, and look."""
        now = self._now()
        elapsed_s, images = now - self._looked, self._images
        self.look()
        return images / elapsed_s if elapsed_s > 0 else 0.0

    def look(self) -> None:
        """Start the next interval of `rate` here; called after an evaluation or a checkpoint."""
        self._looked, self._images = self._now(), 0
