"""A thread pool runs calls in order, on one core per thread, and ends when closed or garbage collected."""

import subprocess
import sys
import threading

import pytest
import torch

from paceline.data.loaders.thread import ThreadPool


def names() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("test pool"))


def test_calls_start_in_order_and_get_the_number_of_their_thread() -> None:
    pool: ThreadPool[int] = ThreadPool(1, "test pool")
    begun: list[int] = []

    def call(number: int, worker: int) -> int:
        begun.append(number)
        return worker

    futures = [pool.submit(lambda worker, number=number: call(number, worker)) for number in range(20)]
    assert [future.result(20) for future in futures] == [0] * 20 and begun == list(range(20))
    pool.close()


def test_threads_run_calls_concurrently() -> None:
    pool: ThreadPool[int] = ThreadPool(3, "test pool")
    barrier = threading.Barrier(3)  # passes only if all three run at once
    futures = [pool.submit(lambda worker: (barrier.wait(20), worker)[1]) for _ in range(3)]
    assert {future.result(20) for future in futures} == {0, 1, 2}
    pool.close()


def test_an_exception_of_a_call_is_raised_by_its_result() -> None:
    pool: ThreadPool[None] = ThreadPool(1, "test pool")

    def fails(worker: int) -> None:
        raise ValueError("so")

    with pytest.raises(ValueError, match="so"):
        pool.submit(fails).result(20)
    assert pool.submit(lambda worker: None).result(20) is None  # the thread lives on
    pool.close()


def test_threads_compute_on_one_core_and_other_threads_keep_theirs() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    pool: ThreadPool[int] = ThreadPool(2, "test pool")
    try:
        futures = [pool.submit(lambda worker: torch.get_num_threads()) for _ in range(4)]
        assert [future.result(20) for future in futures] == [1] * 4
        assert torch.get_num_threads() == 2
        later: list[int] = []
        thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        thread.start()
        thread.join(20)
        assert later == [2]  # as the rank's own threads, such as those of backward
    finally:
        torch.set_num_threads(before)
        pool.close()


def test_closing_ends_the_threads_and_is_idempotent() -> None:
    pool: ThreadPool[int] = ThreadPool(2, "test pool")
    assert names() == ["test pool 0", "test pool 1"]
    pool.close()
    pool.close()
    assert names() == []


def test_threads_end_when_the_pool_is_garbage_collected() -> None:
    pool = ThreadPool[int](2, "test pool")
    assert len(names()) == 2
    del pool
    assert names() == []


def test_closing_cancels_queued_calls_and_waits_for_running_ones() -> None:
    pool: ThreadPool[str] = ThreadPool(1, "test pool")
    begun, may_end = threading.Event(), threading.Event()

    def call(worker: int) -> str:
        begun.set()
        may_end.wait(20)
        return "done"

    first, second = pool.submit(call), pool.submit(call)
    begun.wait(20)
    threading.Timer(0.05, may_end.set).start()
    pool.close()
    assert first.result(0) == "done" and second.cancelled() and names() == []


PROGRAM = """
import torch
from paceline.data.loaders.thread import ThreadPool
pool = ThreadPool(3, "test pool")
images = torch.zeros(64, 3, 64, 64)
futures = [pool.submit(lambda worker: images.sum()) for _ in range(2000)]
futures[10].result()
"""


def test_a_program_can_exit_while_threads_compute() -> None:
    """Torch aborts a process whose interpreter is gone while a thread computes."""
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")
