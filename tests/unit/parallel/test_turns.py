"""Some ranks first, and the others behind them."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from paceline.core.errors import WorldError
from paceline.parallel.turns import in_turn


def test_others_wait_for_all_that_are_first_and_look_up_meanwhile() -> None:
    store, looked_up, events = HashStore(), threading.Event(), []

    def work(is_first: bool) -> bool:
        if is_first:
            assert looked_up.wait(30)  # which the other does while it waits
        events.append(is_first)
        return is_first

    with ThreadPoolExecutor() as pool:
        told = [pool.submit(in_turn, store, 2, work, looked_up.set, is_first=rank < 2) for rank in range(4)]
        assert [each.result(30) for each in told] == [True, True, False, False]
    assert events == [True, True, False, False]


def test_whoever_has_nothing_to_wait_for_leaves() -> None:
    def waits() -> None:
        raise WorldError("it failed")

    with pytest.raises(WorldError, match="it failed"):
        in_turn(HashStore(), 1, lambda is_first: is_first, waits, is_first=False)


def test_what_a_first_rank_does_is_done_once_also_where_nothing_comes_of_it() -> None:
    done: list[bool] = []
    in_turn(HashStore(), 1, done.append, lambda: None, is_first=True)
    assert done == [True]
