"""Fetch whole shards in background threads, each once, in the order of requests."""

import threading
from collections.abc import Callable
from queue import SimpleQueue

from paceline.core.errors import DataError
from paceline.data.remote.fetching import CorruptFileError, FetchOutcome

NUM_FETCH_THREADS = 4


class ShardPrefetcher:
    """Call `keep` in threads for requested shards.

    A shard that does not fit is not retried; one that another process is fetching is, on the next request. A
    `CorruptFileError` is raised at the next request of the shard. Other errors are dropped, as reading the shard raises them
    too.
    """

    def __init__(self, keep: Callable[[int], FetchOutcome]) -> None:
        self._fetch_shard = keep
        self._lock = threading.Lock()
        self._queue: SimpleQueue[int | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._requested: set[int] = set()
        self._faults: dict[int, CorruptFileError] = {}

    def request(self, shard: int) -> None:
        """Queue a shard unless it is queued. Raise the `CorruptFileError` of an earlier attempt."""
        if shard in self._faults:
            raise self._faults[shard]
        with self._lock:
            if shard in self._requested:
                return
            self._requested.add(shard)
            if len(self._threads) < min(NUM_FETCH_THREADS, len(self._requested)):
                thread = threading.Thread(target=self._run, name=f"fetch-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()
        self._queue.put(shard)

    def stop(self) -> None:
        """Stop the threads after their current shards."""
        with self._lock:
            threads = [*self._threads]
            self._threads.clear()
        for _ in threads:
            self._queue.put(None)

    def wait(self) -> None:
        """Wait until all requested shards are done."""
        with self._lock:
            threads = [*self._threads]
        self.stop()
        for thread in threads:
            thread.join()

    def _run(self) -> None:
        while (shard := self._queue.get()) is not None:
            try:
                outcome = self._fetch_shard(shard)
            except CorruptFileError as error:
                self._faults[shard] = error
                continue
            except DataError:
                outcome = "busy"
            if outcome != "full":
                with self._lock:
                    self._requested.discard(shard)
