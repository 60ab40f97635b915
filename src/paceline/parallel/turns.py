"""Some ranks first and the others behind them, told by a store: nobody stands in a collective, which would time out."""

import threading
from collections.abc import Callable
from typing import Final, TypeVar

from torch.distributed import Store  # type: ignore[attr-defined]

T = TypeVar("T")
_DONE: Final = "done"
_LEFT: Final = "left"
_SHORT_S, _LONG_S = 0.01, 0.5


def in_turn(
    store: Store, num_firsts: int, work: Callable[[bool], T], waits: Callable[[], None], *, is_first: bool
) -> T:
    """Return `work(True)` on each of the `num_firsts` ranks that are first, and then, on the others, `work(False)`.

    However long that takes: `waits` is called now and then meanwhile, and raises where there is nothing to wait for. A
    `store` serves once, so hand over a prefix of its own.
    """
    results = [work(True)] if is_first else []
    store.add(_DONE, int(is_first))
    _wait_for(store, _DONE, num_firsts, waits)
    return results[0] if results else work(False)


def leave_last(store: Store, num_others: int, waits: Callable[[], None], *, is_last: bool) -> None:
    """Return on the rank that is last after all others have come here, and on those at once.

    Whoever has the store in its own process is to be last: where it ends, nobody else can ask for anything any more.
    `waits` and `store` are as for `in_turn`.
    """
    store.add(_LEFT, int(not is_last))
    if is_last:
        _wait_for(store, _LEFT, num_others, waits)


def _wait_for(store: Store, name: str, number: int, waits: Callable[[], None]) -> None:
    """Return when what is counted under `name` has come to `number`."""
    pause_s = _SHORT_S
    while store.add(name, 0) < number:
        waits()
        threading.Event().wait(pause_s)
        pause_s = min(_LONG_S, 2 * pause_s)
