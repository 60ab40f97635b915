"""A probe of what data costs: the first few batches over and over, as if making the others took no time.

What a run is worth on so few images is not the question. With progressive sizes the images of all steps have the sizes
of the first ones. What is done to a batch on the device is done to it each time.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from paceline.core.results import LoaderResult
from paceline.data.batch import Batch
from paceline.data.loader import Loader

NUM_REPLAYED: Final = 4
"""Batches that are replayed: more than one, so that what a device has in its caches is not the whole of the data."""


@dataclass(frozen=True)
class ReplayedLoader:
    """Hand out the first `num_batches` batches of `loader` over and over, each as `keep` returns it.

    All are made before the first is handed out; then the workers of `loader` end. What `keep` returns must not be
    changed in place. Bad samples are told of once.
    """

    loader: Loader
    num_batches: int
    keep: Callable[[Batch], Batch]

    def batches(self, first: int, stop: int) -> Iterator[Batch]:
        """Return an iterator over `stop - first` batches, made as those from number `first` on."""
        made = self.loader.batches(first, min(stop, first + self.num_batches))
        kept = [self.keep(batch) for batch in made]
        self.loader.close()
        yield from kept
        again = [replace(batch, bad=()) for batch in kept]
        for number in range(first + len(kept), stop):
            yield again[(number - first) % len(again)]

    def stats(self) -> LoaderResult | None:
        """Return what making the batches took, each counted once."""
        return self.loader.stats()

    def close(self) -> None:
        """End the workers of `loader`, where they live."""
        self.loader.close()


def as_it_is(batch: Batch) -> Batch:
    """Return the batch: it is kept where the loader has made it, in page-locked memory for a GPU."""
    return batch
