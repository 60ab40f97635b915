"""Threads of this process that carry out calls, in the order in which they are handed in, whatever they do."""

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from queue import Empty, SimpleQueue
from typing import Any, Final, Generic, TypeVar

import torch

T = TypeVar("T")
_CLOSE_S: Final = 2.0
"""How long threads are waited for that are to end: far longer than one batch takes, unless it hangs."""
_Calls = SimpleQueue[tuple["Future[Any]", Callable[[int], Any]] | None]


class Hands(Generic[T]):
    """`num` threads, which live until they are closed, nobody holds this any more, or the program ends.

    They compute with one core each, whatever torch computes with elsewhere. One that hangs is left behind.
    """

    def __init__(self, num: int, name: str) -> None:
        self._calls: _Calls = SimpleQueue()
        self._pid = os.getpid()
        started = threading.Barrier(num + 1)
        ended: list[Future[None]] = [Future() for _ in range(num)]
        threads = [
            threading.Thread(
                target=_work, args=(number, self._calls, started, ended[number]), name=f"{name} {number}", daemon=True
            )
            for number in range(num)
        ]
        num_cores = torch.get_num_threads()
        for thread in threads:
            thread.start()
        started.wait()
        torch.set_num_threads(num_cores)  # a new thread takes what any thread has set last
        # Also when the program ends: a thread that is in the midst of torch when Python is gone would abort it.
        self._end = weakref.finalize(self, _end, self._calls, threads, ended, self._pid)

    @property
    def are_here(self) -> bool:
        """Whether the threads are of this process: a fork has none."""
        return self._pid == os.getpid()

    def submit(self, call: Callable[[int], T]) -> "Future[T]":
        """Hand in `call`, which is called with the number of the thread; return what it will come to."""
        future: Future[T] = Future()
        self._calls.put((future, call))
        return future

    def close(self) -> None:
        """Leave out what has not begun, and wait for a while until the threads have ended."""
        self._end()


def _end(calls: _Calls, threads: Sequence[threading.Thread], ended: Sequence["Future[None]"], pid: int) -> None:
    if pid != os.getpid():
        return
    try:
        while (handed := calls.get_nowait()) is not None:
            handed[0].cancel()
    except Empty:
        pass
    for _ in threads:
        calls.put(None)
    wait(ended, _CLOSE_S)
    for thread, own in zip(threads, ended, strict=True):
        if own.done() and thread is not threading.current_thread():
            thread.join()


def _work(number: int, calls: _Calls, started: threading.Barrier, ended: "Future[None]") -> None:
    torch.get_num_threads()  # or the first computation would take what is set for others
    torch.set_num_threads(1)
    started.wait()
    while (handed := calls.get()) is not None:
        future, call = handed
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(call(number))
            except BaseException as error:
                future.set_exception(error)
        del handed, future, call  # a thread that waits holds no batch
    ended.set_result(None)
