"""Log when training paused, for the timeline of the report."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from paceline.core.run_dir import append_line
from paceline.measure.throughput import unix_s

LogPause = Callable[[str, int], contextlib.AbstractContextManager[None]]
"""Return a context for a pause of the given name after the given step."""


def no_log(name: str, step: int) -> contextlib.AbstractContextManager[None]:
    """Log nothing."""
    return contextlib.nullcontext()


def build_pause_log(path: Path, now: Callable[[], float] = unix_s) -> LogPause:
    """Return a log that appends the begin (seconds since 1970) and length of each pause to a JSON-lines file."""

    @contextlib.contextmanager
    def log(name: str, step: int) -> Iterator[None]:
        begin_s = now()
        try:
            yield
        finally:
            # On a full disk the timeline lacks a pause.
            with contextlib.suppress(OSError):
                pause_s = round(max(0.0, now() - begin_s), 4)
                append_line(path, {"name": name, "step": step, "unix_s": round(begin_s, 3), "pause_s": pause_s})

    return log
