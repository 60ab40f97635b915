"""A pool of daemon threads that run calls in order of submission."""

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from queue import Empty, SimpleQueue
from typing import Any, Final, Generic, TypeVar

import torch

ResultT = TypeVar("ResultT")
# Seconds to wait for threads that should end: far longer than one batch takes, unless a thread hangs.
_JOIN_TIMEOUT_S: Final = 2.0
_CallQueue = SimpleQueue[tuple["Future[Any]", Callable[[int], Any]] | None]


class ThreadPool(Generic[ResultT]):
    """`num` threads that live until `close`, garbage collection or interpreter exit.

    Each thread computes on one core, whatever torch uses elsewhere. A thread that hangs is abandoned.
    """

    def __init__(self, num: int, name: str) -> None:
        self._calls: _CallQueue = SimpleQueue()
        self._pid = os.getpid()
        started = threading.Barrier(num + 1)
        ended: list[Future[None]] = [Future() for _ in range(num)]
        threads = [
            threading.Thread(
                target=_run_calls,
                args=(number, self._calls, started, ended[number]),
                name=f"{name} {number}",
                daemon=True,
            )
            for number in range(num)
        ]
        num_cores = torch.get_num_threads()
        for thread in threads:
            thread.start()
        started.wait()
        torch.set_num_threads(num_cores)  # a new thread inherits the value that any thread has set last
        # Runs at interpreter exit too: a thread inside torch after Python is gone would abort the process.
        self._finalizer = weakref.finalize(self, _shut_down, self._calls, threads, ended, self._pid)

    @property
    def is_in_this_process(self) -> bool:
        """Whether the threads belong to this process: a forked child has none."""
        return self._pid == os.getpid()

    def submit(self, call: Callable[[int], ResultT]) -> "Future[ResultT]":
        """Queue `call`, which gets the number of its thread; return its future."""
        future: Future[ResultT] = Future()
        self._calls.put((future, call))
        return future

    def close(self) -> None:
        """Cancel queued calls, and wait a limited time for the threads to end."""
        self._finalizer()


def _shut_down(
    calls: _CallQueue, threads: Sequence[threading.Thread], ended: Sequence["Future[None]"], pid: int
) -> None:
    if pid != os.getpid():
        return
    try:
        while (queued := calls.get_nowait()) is not None:
            queued[0].cancel()
    except Empty:
        pass
    for _ in threads:
        calls.put(None)
    wait(ended, _JOIN_TIMEOUT_S)
    for thread, end in zip(threads, ended, strict=True):
        if end.done() and thread is not threading.current_thread():
            thread.join()


def _run_calls(number: int, calls: _CallQueue, started: threading.Barrier, ended: "Future[None]") -> None:
    torch.get_num_threads()  # initializes this thread: otherwise its first computation would reset the value below
    torch.set_num_threads(1)
    started.wait()
    while (queued := calls.get()) is not None:
        future, call = queued
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(call(number))
            except BaseException as error:
                future.set_exception(error)
        del queued, future, call  # so that an idle thread keeps no batch alive
    ended.set_result(None)
