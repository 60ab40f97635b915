"""Waiting for the next batch so that signals act, and not for ever. Knows nothing of who makes it."""

from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from paceline.core.errors import WatchError
from paceline.core.units import Duration
from paceline.data.workers import POLL_S

T = TypeVar("T")


def poll(is_done: Callable[[float], bool], timeout: Duration, verdict: Callable[[], str]) -> None:
    """Ask `is_done` whether it is, giving it so many seconds, until it is.

    Raise `WatchError` with the `verdict` after `timeout`.
    """
    left_s = timeout.seconds
    while not is_done(min(POLL_S, left_s)):
        left_s -= POLL_S
        if left_s <= 0:
            raise WatchError(verdict())


def result(future: "Future[T]", timeout: Duration, verdict: Callable[[], str]) -> T:
    """Return what a future comes to, or raise what it raises; else as `poll`."""
    poll(lambda within_s: bool(wait([future], within_s).done), timeout, verdict)
    return future.result()
