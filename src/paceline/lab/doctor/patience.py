"""Ask what may never answer, such as a name server or a network disk, and go on after a while."""

import threading
from collections.abc import Callable
from typing import Final, TypeVar

from paceline.core.units import seconds

T = TypeVar("T")
WAIT_S: Final = 3.0
"""A name server that does not answer takes half a minute, and a disk that does not, for ever."""


def answer(ask: Callable[[], T], wait_s: float = WAIT_S) -> T:
    """Return what `ask` returns, or raise what it raises; `TimeoutError` where neither is so within `wait_s`.

    What has not answered is left behind in a thread that holds nobody up.
    """
    answers: list[T] = []
    errors: list[Exception] = []

    def work() -> None:
        try:
            answers.append(ask())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(wait_s)
    if answers:
        return answers[0]
    raise errors[0] if errors else TimeoutError(f"no answer within {seconds(wait_s)}")
