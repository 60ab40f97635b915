"""Steps from a split's loader to finished batches, shared by both splits."""

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
    """Components that produce a split's batches, in order of use, and the split's metadata `facts`.

    `loader` makes batches and `ahead` gets them from it, `left_out` records bad images, `place` moves a batch to the
    device, and `finish` does the rest there.
    """

    loader: Loader
    ahead: Ahead
    left_out: LeftOut
    place: Placement
    finish: Finish
    facts: Dataset

    def note_bad(self, batch: Batch) -> None:
        """Warn of the bad images of a batch. Raise `DataError` for too many so far."""
        if batch.bad:
            self.left_out.note(batch.bad)
            self.left_out.settle()

    def finished(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return (images, targets) on the device, ready for a training loop."""
        return self.finish(self.place(batch))

    def close(self) -> None:
        """Stop the workers."""
        self.ahead.close()
        self.loader.close()
