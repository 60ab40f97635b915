"""Loader that makes each batch on demand in the main process."""

from collections.abc import Iterator
from dataclasses import dataclass

from paceline.core.results import LoaderResult
from paceline.data.batch import Batch
from paceline.data.batches import Batches
from paceline.data.tally import Tally


@dataclass(frozen=True)
class InlineLoader:
    """Make each batch on demand, in this process."""

    dataset: Batches
    pin_memory: bool
    tally: Tally

    def batches(self, first: int, stop: int) -> Iterator[Batch]:
        """Return an iterator over the batches."""
        for number in range(first, stop):
            self.tally.ask(num_ready=0)
            made = self.dataset.make(number, pin_memory=self.pin_memory)
            self.tally.hand(made.work)
            yield made.batch

    def stats(self) -> LoaderResult | None:
        """Return the timing of all batches so far."""
        return self.tally.stats()

    def close(self) -> None:
        """Do nothing: nothing is prefetched."""
