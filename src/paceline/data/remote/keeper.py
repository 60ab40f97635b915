"""Threads that fetch whole shards behind the back of those who read: each shard once, in the order it was wanted."""

import threading
from collections.abc import Callable
from queue import SimpleQueue

from paceline.core.errors import DataError
from paceline.data.remote.fetching import DamageError, Outcome

NUM_THREADS = 4


class Keeper:
    """Calls `keep` with shards that are wanted.

    One that does not fit is not tried again, one that another process is fetching is when it is wanted again. Damage
    that `keep` meets is told to whoever asks for the shard next; what else it raises, whoever reads it meets too.
    """

    def __init__(self, keep: Callable[[int], Outcome]) -> None:
        self._keep = keep
        self._lock = threading.Lock()
        self._queue: SimpleQueue[int | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._wanted: set[int] = set()
        self._faults: dict[int, DamageError] = {}

    def want(self, shard: int) -> None:
        """Have a shard fetched when its turn comes. Raise the `DamageError` that it has met before."""
        if shard in self._faults:
            raise self._faults[shard]
        with self._lock:
            if shard in self._wanted:
                return
            self._wanted.add(shard)
            if len(self._threads) < min(NUM_THREADS, len(self._wanted)):
                thread = threading.Thread(target=self._work, name=f"fetch-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()
        self._queue.put(shard)

    def end(self) -> None:
        """Have the threads end after what they have under way."""
        with self._lock:
            threads = [*self._threads]
            self._threads.clear()
        for _ in threads:
            self._queue.put(None)

    def settle(self) -> None:
        """Wait until all that is wanted is done."""
        with self._lock:
            threads = [*self._threads]
        self.end()
        for thread in threads:
            thread.join()

    def _work(self) -> None:
        while (shard := self._queue.get()) is not None:
            try:
                outcome = self._keep(shard)
            except DamageError as error:
                self._faults[shard] = error
                continue
            except DataError:
                outcome = "busy"
            if outcome != "full":
                with self._lock:
                    self._wanted.discard(shard)
