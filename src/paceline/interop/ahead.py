"""Get batches one by one from a loader that prefetches; iteration may stop anywhere."""

from collections.abc import Iterator

from paceline.data.batch import Batch
from paceline.data.loader import Loader


class Prefetcher:
    """Get batches of `loader` by number; consecutive numbers are prefetched.

    There are `stop` batches. Any other order is correct too, but slower, because prefetching restarts.
    """

    def __init__(self, loader: Loader, stop: int) -> None:
        self._loader = loader
        self._stop = stop
        self._batches: Iterator[Batch] = iter(())
        self._next = -1

    def get(self, number: int) -> Batch:
        """Return batch `number`."""
        if number != self._next:
            self._batches = self._loader.batches(number, self._stop)
        self._next = -1  # unless a batch is returned
        batch = next(self._batches)
        self._next = number + 1
        return batch

    def close(self) -> None:
        """Stop the prefetching workers; the next batch starts them again."""
        self._batches, self._next = iter(()), -1
