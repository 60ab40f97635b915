"""Do many things in threads and have their results in order, with few of them waiting at a time."""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")
_AHEAD = 4
"""Tasks a thread: what waits stays small, and no thread waits for one slow image."""


def in_order(tasks: Iterable[Callable[[], Result]], workers: int) -> Generator[Result, None, None]:
    """Give the results of `tasks` in their order, done by `workers` threads. What a task raises is raised.

    Whoever stops early leaves out what has not begun, and waits for what has.
    """
    with ThreadPoolExecutor(workers, thread_name_prefix="pack") as pool:
        waiting: deque[Future[Result]] = deque()
        try:
            for task in tasks:
                waiting.append(pool.submit(task))
                if len(waiting) >= _AHEAD * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
