"""How long a run has trained, and how fast it is going right now: for logs and progress, not for claims."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from paceline.measure.timing import now_s


def unix_s() -> float:
    """Return seconds since 1970: for what is compared between processes. A host's clock may be set meanwhile."""
    return time.time()


def steady_unix_s() -> Callable[[], float]:
    """Return a clock of seconds since 1970 that is read once and does not follow when the host's clock is set."""
    began_s = unix_s() - now_s()
    return lambda: began_s + now_s()


class RunTimer:
    """Seconds of training, `before_s` of earlier processes included, and images/s since the last look.

    Evaluations and checkpoints are part of what a user waits for, so they count in `elapsed_s`. They are `paused` in
    `train_s`, of which earlier processes had `train_before_s`, and in the rate.
    """

    def __init__(
        self, before_s: float = 0.0, now: Callable[[], float] = time.perf_counter, *, train_before_s: float = 0.0
    ) -> None:
        self._now = now
        self._before_s = before_s
        self._train_before_s = train_before_s
        self._paused_s = 0.0
        self._paused_since: float | None = None
        self.started_s = now()
        self._looked = self.started_s
        self._images = 0

    @property
    def elapsed_s(self) -> float:
        """Seconds of training so far, earlier processes included."""
        return self._before_s + self.process_elapsed_s

    @property
    def process_elapsed_s(self) -> float:
        """Seconds of training in this process."""
        return self._now() - self.started_s

    @property
    def train_s(self) -> float:
        """Seconds of training so far without pauses, earlier processes included; it stands still in a pause."""
        until_s = self._now() if self._paused_since is None else self._paused_since
        return self._train_before_s + (until_s - self.started_s) - self._paused_s

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keep what follows, an evaluation or a checkpoint, out of `train_s` and of the rate."""
        self._paused_since = self._now()
        try:
            yield
        finally:
            self._paused_s += self._now() - self._paused_since
            self._paused_since = None
            self.update_rate()

    def add(self, images: int) -> None:
        """Count images of all ranks as trained."""
        self._images += images

    def rate(self) -> float:
        """Return images/s since the last look, and look."""
        now = self._now()
        elapsed_s, images = now - self._looked, self._images
        self.update_rate()
        return images / elapsed_s if elapsed_s > 0 else 0.0

    def update_rate(self) -> None:
        """Start the next interval of `rate` here."""
        self._looked, self._images = self._now(), 0
