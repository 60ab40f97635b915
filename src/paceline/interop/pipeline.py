"""How a split's batches come to be and are finished, which the loaders of both splits share."""

from dataclasses import dataclass

from torch import Tensor

from paceline.data.batch import Batch
from paceline.data.finish import Finish
from paceline.data.loader import Loader
from paceline.data.placement import Placement
from paceline.interop.ahead import Ahead
from paceline.interop.dataset import Dataset
from paceline.train.evaluate import LeftOut


@dataclass(frozen=True)
class Pipeline:
    """What makes the batches of a split, in the order in which a batch meets it, and the split's `facts`.

    `loader` makes them and `ahead` takes them from it, `left_out` hears of bad images, `place` brings a batch to the
    device, and `finish` does the rest there.
    """

    loader: Loader
    ahead: Ahead
    left_out: LeftOut
    place: Placement
    finish: Finish
    facts: Dataset

    def note_bad(self, batch: Batch) -> None:
        """Warn of the bad images of a batch. Raise `DataError` where there are too many so far."""
        if batch.bad:
            self.left_out.note(batch.bad)
            self.left_out.settle()

    def finished(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return (images, targets) on the device, as a loop takes them."""
        return self.finish(self.place(batch))

    def close(self) -> None:
        """End whoever makes batches ahead."""
        self.ahead.close()
        self.loader.close()
