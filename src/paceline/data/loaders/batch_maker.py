"""Make batches by number, and the loader that makes them in the main process."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.core.results import LoaderResult
from paceline.data.augment.geometric import Change
from paceline.data.batch import Batch
from paceline.data.loaders.reader import ReadSamples, SampleReader
from paceline.data.order import BatchSchedule
from paceline.data.pack.shards import check_mapped_files
from paceline.data.timing import BatchTimer, BatchTiming, LoaderStats


# A tuple, so that DataLoader pins the tensors in it.
class TimedBatch(NamedTuple):
    """A batch and its timing."""

    batch: Batch
    timing: BatchTiming


@dataclass(frozen=True)
class BatchMaker:
    """Make the batches of `schedule`, one at a time.

    A sample's draws are consumed in order: by the reader, by `changes`, and by the device.
    """

    schedule: BatchSchedule
    reader: SampleReader
    changes: tuple[Change, ...]
    timer: BatchTimer

    def __getitem__(self, number: int) -> Batch:
        indices = self.schedule.indices(number)
        self.timer.end_stage("collate")
        draws = self.schedule.draws(number)
        self.timer.end_stage("augment")
        used = self.reader.num_draws
        read = self.reader.read(indices, draws[:, :used], self.schedule.size(number))
        return self.augment(indices, draws[:, used:], read)

    def augment(self, indices: NDArray[np.int64], draws: NDArray[np.float64], read: ReadSamples) -> Batch:
        """Return the batch of the samples `read` for `indices`, augmented with the remaining `draws`, float64 [N, D].

        Raise `DataError` if a mapped pack was truncated.
        """
        check_mapped_files()  # a truncated file reads as zeros: check before the pixels are used
        if not read.is_kept.all():  # an evaluation has dropped samples
            indices, draws = indices[read.is_kept], draws[read.is_kept]
        self.timer.end_stage("collate")
        images, used = read.images, 0
        for change in self.changes:
            images = change(images, torch.from_numpy(draws[:, used : used + change.num_draws]))
            used += change.num_draws
        rest = torch.from_numpy(np.ascontiguousarray(draws[:, used:]))
        self.timer.end_stage("augment")
        return Batch(images, read.labels, indices, rest, read.bad)

    def make(self, number: int, *, pin_memory: bool) -> TimedBatch:
        """Return batch `number` and its timing."""
        self.timer.start()
        batch = self[number]
        if pin_memory:
            batch = batch.pin_memory()
        return TimedBatch(batch, self.timer.finish(len(batch), batch.images.nbytes))


@dataclass(frozen=True)
class InlineLoader:
    """Make each batch on demand, in this process."""

    batch_maker: BatchMaker
    pin_memory: bool
    loader_stats: LoaderStats

    def batches(self, first: int, stop: int) -> Iterator[Batch]:
        """Iterate over the batches."""
        for number in range(first, stop):
            self.loader_stats.request_batch(num_ready=0)
            made = self.batch_maker.make(number, pin_memory=self.pin_memory)
            self.loader_stats.deliver_batch(made.timing)
            yield made.batch

    def stats(self) -> LoaderResult | None:
        """Return the timing so far."""
        return self.loader_stats.build_result()

    def close(self) -> None:
        """Do nothing: nothing is prefetched."""
