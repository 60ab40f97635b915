"""Wait for a batch with a timeout, in short waits so that signal handlers run."""

from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from paceline.core.errors import WatchError
from paceline.core.units import Duration
from paceline.data.workers import POLL_S

FutureT = TypeVar("FutureT")


def wait_until(is_done: Callable[[float], bool], timeout: Duration, verdict: Callable[[], str]) -> None:
    """Call `is_done` with short waits in seconds until it returns true.

    Raise `WatchError` with the text of `verdict` after `timeout`.
    """
    left_s = timeout.seconds
    while not is_done(min(POLL_S, left_s)):
        left_s -= POLL_S
        if left_s <= 0:
            raise WatchError(verdict())


def wait_for_result(future: "Future[FutureT]", timeout: Duration, verdict: Callable[[], str]) -> FutureT:
    """Wait for a future as `wait_until` does, and return its result."""
    wait_until(lambda within_s: bool(wait([future], within_s).done), timeout, verdict)
    return future.result()
