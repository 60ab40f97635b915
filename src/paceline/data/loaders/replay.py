"""Replay the first batches repeatedly, to measure training without the cost of loading.

The weights of such a run are meaningless, and with progressive resizing all steps have the first image sizes.
Device-side augmentation runs on every repetition.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from paceline.core.results import LoaderResult
from paceline.data.batch import Batch
from paceline.data.loaders.build import Loader

# Batches that are replayed: several, so that the device's caches do not hold all the data.
NUM_REPLAYED_BATCHES: Final = 4


@dataclass(frozen=True)
class ReplayLoader:
    """Yield the first `num_batches` batches of `loader` repeatedly, each as `store` returns it.

    They must not be modified in place.
    """

    loader: Loader
    num_batches: int
    store: Callable[[Batch], Batch]

    def batches(self, first: int, stop: int) -> Iterator[Batch]:
        """Return an iterator over `stop - first` batches, repeating those from number `first` on."""
        made = self.loader.batches(first, min(stop, first + self.num_batches))
        stored = [self.store(batch) for batch in made]
        self.loader.close()  # before the first batch, so that no worker runs beside the measured steps
        yield from stored
        # Report bad samples once.
        repeated = [replace(batch, bad=()) for batch in stored]
        for number in range(first + len(stored), stop):
            yield repeated[(number - first) % len(repeated)]

    def stats(self) -> LoaderResult | None:
        """Return the timing of making the batches, each counted once."""
        return self.loader.stats()

    def close(self) -> None:
        """End the workers of `loader`."""
        self.loader.close()


def keep_on_host(batch: Batch) -> Batch:
    """Return the batch unchanged."""
    return batch
