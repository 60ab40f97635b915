"""Batches taken one by one, and made ahead: whoever takes them may stop anywhere, and workers can be ended for it."""

from collections.abc import Iterator

from paceline.data.batch import Batch
from paceline.data.loader import Loader


class Ahead:
    """Take batches of `loader` by their numbers; where these follow one another, the next are made meanwhile.

    There are `stop` batches. Any other order is as right, and slower, as making them begins anew.
    """

    def __init__(self, loader: Loader, stop: int) -> None:
        self._loader = loader
        self._stop = stop
        self._batches: Iterator[Batch] = iter(())
        self._next = -1

    def take(self, number: int) -> Batch:
        """Return batch `number`."""
        if number != self._next:
            self._batches = self._loader.batches(number, self._stop)
        self._next = -1  # until there is a batch
        batch = next(self._batches)
        self._next = number + 1
        return batch

    def close(self) -> None:
        """End whoever works ahead, with the iterator that they work for; another batch starts others."""
        self._batches, self._next = iter(()), -1
