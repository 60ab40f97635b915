"""Loader that makes each batch on demand in the main process."""

from collections.abc import Iterator
from dataclasses import dataclass

from paceline.core.results import LoaderResult
from paceline.data.batch import Batch
from paceline.data.batches import BatchMaker
from paceline.data.tally import LoaderStats


@dataclass(frozen=True)
class InlineLoader:
    """Make each batch on demand, in this process."""

    batch_maker: BatchMaker
    pin_memory: bool
    loader_stats: LoaderStats

    def batches(self, first: int, stop: int) -> Iterator[Batch]:
        """Return an iterator over the batches."""
        for number in range(first, stop):
            self.loader_stats.request_batch(num_ready=0)
            made = self.batch_maker.make(number, pin_memory=self.pin_memory)
            self.loader_stats.deliver_batch(made.timing)
            yield made.batch

    def stats(self) -> LoaderResult | None:
        """Return the timing of all batches so far."""
        return self.loader_stats.build_result()

    def close(self) -> None:
        """Do nothing: nothing is prefetched."""
