"""Some ranks first and the others behind them, told by a store: nobody stands in a collective, which would time out."""

import threading
from collections.abc import Callable, Iterator
from typing import Final, TypeVar

from torch.distributed import Store  # type: ignore[attr-defined]

T = TypeVar("T")
_DONE: Final = "done"
_EXITED: Final = "left"
_SHORT_S, _LONG_S = 0.01, 0.5


def run_in_order(
    store: Store, num_firsts: int, work: Callable[[bool], T], on_wait: Callable[[], None], *, is_first: bool
) -> T:
    """Return `work(True)` on each of the `num_firsts` ranks that are first, and then, on the others, `work(False)`.

    However long that takes: `on_wait` is called now and then meanwhile, and raises where there is nothing to wait for. A
    `store` serves once, so hand over a prefix of its own.
    """
    results = [work(True)] if is_first else []
    _wait_for_count(store, _DONE, int(is_first), num_firsts, on_wait)
    return results[0] if results else work(False)


def exit_last(store: Store, num_others: int, on_wait: Callable[[], None], *, is_last: bool) -> None:
    """Return on the rank that is last after all others have come here, and on those at once.

    Whoever has the store in its own process is to be last: where it ends, nobody else can ask for anything any more.
    `on_wait` and `store` are as for `run_in_order`.
    """
    if is_last:
        _wait_for_count(store, _EXITED, 0, num_others, on_wait)
    else:  # the store may be gone as soon as it has answered, so nothing else is asked
        store.add(_EXITED, 1)


def _wait_for_count(store: Store, name: str, more: int, number: int, on_wait: Callable[[], None]) -> None:
    """Count `more` under `name`, and return when it has come to `number`.

    A thread asks the store: where that is on a machine that is cut off, or in a process that is frozen, it never
    answers, and whoever waits must still look up, by a handle of its own if `on_wait` asks the store too: one serves one
    call at a time.
    """
    errors, is_over, ends = list[Exception](), threading.Event(), threading.Event()

    def ask() -> None:
        try:
            pauses = _pauses()
            counted = store.add(name, more)
            while counted < number and not ends.wait(next(pauses)):
                counted = store.add(name, 0)
        except Exception as error:
            errors.append(error)
        finally:
            is_over.set()

    threading.Thread(target=ask, name="paceline-turns", daemon=True).start()
    try:
        pauses = _pauses()
        while not is_over.wait(next(pauses)):
            on_wait()
    finally:
        ends.set()
    if errors:
        raise errors[0]


def _pauses() -> Iterator[float]:
    """Yield how many seconds to wait before each look: short ones first, for most have not long to wait."""
    pause_s = _SHORT_S
    while True:
        yield pause_s
        pause_s = min(_LONG_S, 2 * pause_s)
