"""Steps from a split's loader to finished batches, shared by both splits."""

from dataclasses import dataclass

from torch import Tensor

from paceline.data.batch import Batch
from paceline.data.finish import DeviceTransforms
from paceline.data.loader import Loader
from paceline.data.placement import DeviceTransfer
from paceline.interop.ahead import Prefetcher
from paceline.interop.dataset import Dataset
from paceline.train.evaluate import BadImageCollector


@dataclass(frozen=True)
class SplitPipeline:
    """Components that produce a split's batches, in order of use, and the split's metadata `dataset`.

    `loader` makes batches and `prefetcher` gets them from it, `left_out` records bad images, `placement` moves a batch to the
    device, and `finish` does the rest there.
    """

    loader: Loader
    prefetcher: Prefetcher
    left_out: BadImageCollector
    placement: DeviceTransfer
    finish: DeviceTransforms
    dataset: Dataset

    def warn_bad_images(self, batch: Batch) -> None:
        """Warn of the bad images of a batch. Raise `DataError` for too many so far."""
        if batch.bad:
            self.left_out.add(batch.bad)
            self.left_out.sync()

    def to_device(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return (images, targets) on the device, ready for a training loop."""
        return self.finish(self.placement(batch))

    def close(self) -> None:
        """Stop the workers."""
        self.prefetcher.close()
        self.loader.close()
