"""Threads that carry out calls: in order, one core each, and gone when they are closed or forgotten."""

import subprocess
import sys
import threading

import pytest
import torch

from paceline.data.loaders.thread import ThreadPool


def names() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("test hands"))


def test_calls_begin_in_order_and_learn_which_thread_makes_them() -> None:
    hands: ThreadPool[int] = ThreadPool(1, "test hands")
    begun: list[int] = []

    def call(number: int, worker: int) -> int:
        begun.append(number)
        return worker

    futures = [hands.submit(lambda worker, number=number: call(number, worker)) for number in range(20)]
    assert [future.result(20) for future in futures] == [0] * 20 and begun == list(range(20))
    hands.close()


def test_as_many_calls_are_made_at_once_as_there_are_threads() -> None:
    hands: ThreadPool[int] = ThreadPool(3, "test hands")
    meeting = threading.Barrier(3)  # nobody leaves before all have come
    futures = [hands.submit(lambda worker: (meeting.wait(20), worker)[1]) for _ in range(3)]
    assert {future.result(20) for future in futures} == {0, 1, 2}
    hands.close()


def test_what_a_call_raises_is_raised_where_its_result_is_asked_for() -> None:
    hands: ThreadPool[None] = ThreadPool(1, "test hands")

    def fails(worker: int) -> None:
        raise ValueError("so")

    with pytest.raises(ValueError, match="so"):
        hands.submit(fails).result(20)
    assert hands.submit(lambda worker: None).result(20) is None  # the thread lives on
    hands.close()


def test_threads_compute_with_one_core_and_leave_the_others_theirs() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    hands: ThreadPool[int] = ThreadPool(2, "test hands")
    try:
        futures = [hands.submit(lambda worker: torch.get_num_threads()) for _ in range(4)]
        assert [future.result(20) for future in futures] == [1] * 4
        assert torch.get_num_threads() == 2
        later: list[int] = []
        thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        thread.start()
        thread.join(20)
        assert later == [2]  # as the rank's own threads, such as those of backward
    finally:
        torch.set_num_threads(before)
        hands.close()


def test_closing_ends_the_threads_and_can_be_done_twice() -> None:
    hands: ThreadPool[int] = ThreadPool(2, "test hands")
    assert names() == ["test hands 0", "test hands 1"]
    hands.close()
    hands.close()
    assert names() == []


def test_threads_end_when_nobody_holds_them() -> None:
    hands = ThreadPool[int](2, "test hands")
    assert len(names()) == 2
    del hands
    assert names() == []


def test_closing_leaves_out_what_has_not_begun_and_waits_for_what_has() -> None:
    hands: ThreadPool[str] = ThreadPool(1, "test hands")
    begun, may_end = threading.Event(), threading.Event()

    def call(worker: int) -> str:
        begun.set()
        may_end.wait(20)
        return "done"

    first, second = hands.submit(call), hands.submit(call)
    begun.wait(20)
    threading.Timer(0.05, may_end.set).start()
    hands.close()
    assert first.result(0) == "done" and second.cancelled() and names() == []


PROGRAM = """
import torch
from paceline.data.loaders.thread import ThreadPool
hands = ThreadPool(3, "test hands")
images = torch.zeros(64, 3, 64, 64)
futures = [hands.submit(lambda worker: images.sum()) for _ in range(2000)]
futures[10].result()
"""


def test_a_program_that_ends_in_the_midst_of_it_ends_well() -> None:
    """Torch aborts a program whose Python is gone while a thread of it is in there."""
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")
