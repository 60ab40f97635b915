"""Run tasks in threads and yield their results in order."""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")
# Pending tasks per thread: enough that no thread waits for one slow image.
_TASKS_PER_THREAD = 4


def run_ordered(tasks: Iterable[Callable[[], Result]], workers: int) -> Generator[Result, None, None]:
    """Yield the results of `tasks` in order, computed by `workers` threads. A task's exception is raised.

    Closing the generator cancels pending tasks and waits for running ones.
    """
    with ThreadPoolExecutor(workers, thread_name_prefix="pack") as pool:
        pending: deque[Future[Result]] = deque()
        try:
            for task in tasks:
                pending.append(pool.submit(task))
                if len(pending) >= _TASKS_PER_THREAD * workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
