"""Call functions that may hang, such as name lookups or access to network disks, with a timeout."""

import threading
from collections.abc import Callable
from typing import Final, TypeVar

from paceline.core.units import seconds

T = TypeVar("T")
ANSWER_TIMEOUT_S: Final = 3.0
"""Default timeout in seconds. An unresponsive name server takes half a minute, and a dead disk forever."""


def call_with_timeout(function: Callable[[], T], timeout_s: float = ANSWER_TIMEOUT_S) -> T:
    """Call `ask` in a thread; return or raise what it does. Raise `TimeoutError` after `timeout_s` seconds."""
    results: list[T] = []
    errors: list[Exception] = []

    def work() -> None:
        try:
            results.append(function())
        except Exception as error:
            errors.append(error)

    # A daemon thread, so that a call that hangs does not keep the process alive.
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(timeout_s)
    if results:
        return results[0]
    raise errors[0] if errors else TimeoutError(f"no answer within {seconds(timeout_s)}")
