"""`run_in_order`: some ranks first, then the others; and `exit_last`."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from torch.distributed import HashStore, Store

from paceline.core.errors import WorldError
from paceline.parallel.process_group import exit_last, run_in_order


def test_others_wait_for_the_first_ranks_and_call_on_wait() -> None:
    store, looked_up, events = HashStore(), threading.Event(), []

    def work(is_first: bool) -> bool:
        if is_first:
            assert looked_up.wait(30)  # which the other does while it waits
        events.append(is_first)
        return is_first

    with ThreadPoolExecutor() as pool:
        told = [pool.submit(run_in_order, store, 2, work, looked_up.set, is_first=rank < 2) for rank in range(4)]
        assert [each.result(30) for each in told] == [True, True, False, False]
    assert events == [True, True, False, False]


def test_without_others_it_returns_at_once() -> None:
    def waits() -> None:
        raise WorldError("it failed")

    with pytest.raises(WorldError, match="it failed"):
        run_in_order(HashStore(), 1, lambda is_first: is_first, waits, is_first=False)


def test_a_first_rank_works_once_even_if_it_returns_none() -> None:
    done: list[bool] = []
    run_in_order(HashStore(), 1, done.append, lambda: None, is_first=True)
    assert done == [True]


class FrozenStore(Store):
    """A store that answers when it is let to, such as one in a process that is stopped."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = threading.Event()

    def add(self, key: str, amount: int) -> int:
        assert self.answers.wait(30)
        return amount


def test_if_the_store_does_not_answer_a_waiting_rank_can_still_give_up() -> None:
    store, looks = FrozenStore(), []

    def waits() -> None:
        looks.append(store.answers.is_set())
        if len(looks) == 4:
            raise WorldError("it is silent")

    try:
        with pytest.raises(WorldError, match="it is silent"):
            run_in_order(store, 1, lambda is_first: is_first, waits, is_first=False)
    finally:
        store.answers.set()
    assert looks == [False] * 4


class LostStore(Store):
    """A store whose process has ended."""

    def add(self, key: str, amount: int) -> int:
        raise dist.DistNetworkError("Connection reset by peer")


def test_a_lost_store_is_raised() -> None:
    with pytest.raises(dist.DistNetworkError, match="Connection reset by peer"):
        run_in_order(LostStore(), 1, lambda is_first: is_first, lambda: None, is_first=False)


def test_each_rank_is_counted_once_and_the_last_waits_for_the_others_alone() -> None:
    store, events = HashStore(), []

    def leave(is_last: bool) -> None:
        if not is_last:
            events.append(False)
        exit_last(store, 2, lambda: None, is_last=is_last)
        if is_last:
            events.append(True)

    with ThreadPoolExecutor() as pool:
        last = pool.submit(leave, True)
        leave(False)
        assert not last.done()
        leave(False)
        last.result(30)
    assert events == [False, False, True] and store.add("exited", 0) == 2
