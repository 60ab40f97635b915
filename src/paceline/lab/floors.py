"""Ceilings of a machine for loaders: decoding or copying alone."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from paceline.data.native import DecodeTask, NativeExtension
from paceline.data.native_plan import BatchPlan, BatchPlanner
from paceline.data.pack.reader import PackSource
from paceline.data.sampler import TrainOrder
from paceline.data.schedule import TrainBatchSchedule
from paceline.data.sizing import build_train_resizer
from paceline.lab.loaders import CacheState, LoaderMeasurement, MeasurementWindow, count_images
from paceline.recipe.schema.data import Data

DECODE_CEILING: Final = "ceiling: native decode"
DECODE_STAGES: Final = {"ceiling: entropy decode": 1, "ceiling: to planes": 2, DECODE_CEILING: 0}
_MAX_IN_FLIGHT: Final = 4
_COPIED_BYTES: Final = 256 << 20
"""More than any CPU cache holds, so that memory is copied."""


@dataclass(frozen=True)
class DecodeCeiling:
    """The native decoder on a pack, up to a stage, without collating batches."""

    name: str
    stage: int
    source: PackSource
    data: Data
    core: NativeExtension
    cores: int

    def measure(self, window: MeasurementWindow, cache: CacheState) -> LoaderMeasurement:
        """Measure it in this process."""
        counted = count_images(self.iter_batch_sizes(window), window.seconds, 2 * _MAX_IN_FLIGHT)
        num_bytes = self.source.locate(np.arange(window.num_images, dtype=np.int64))[2].mean()
        return counted.to_measurement(round(counted.images * num_bytes), 0)

    def iter_batch_sizes(self, window: MeasurementWindow) -> Iterator[int]:
        """Yield the size of each batch when it is decoded, endlessly."""
        planned, pool = self._iter_planned(window), self.core.Pool(self.cores)
        pending: deque[tuple[DecodeTask, int]] = deque()
        outs = [self._allocate_output(window) for _ in range(_MAX_IN_FLIGHT + 1)]
        for number, batch in enumerate(planned):
            out = outs[number % len(outs)]
            status = np.zeros(len(batch.indices), dtype=np.int32)
            arguments = (
                batch.shard_buffers,
                batch.shard_numbers,
                batch.offsets,
                batch.lengths,
                batch.boxes,
                batch.flips,
            )
            task = pool.submit(*arguments, batch.is_inside, batch.size, out.shape[1], out, status, self.stage)
            pending.append((task, len(batch.indices)))
            if len(pending) == _MAX_IN_FLIGHT:
                task, size = pending.popleft()
                while not task.wait(1.0):
                    pass
                yield size

    def _allocate_output(self, window: MeasurementWindow) -> NDArray[np.uint8]:
        side = window.image_size
        return np.zeros((window.batch_size, self.source.info.channels, side, side), dtype=np.uint8)

    def _iter_planned(self, window: MeasurementWindow) -> Iterator[BatchPlan]:
        order, sizing = TrainOrder(0, window.num_images, window.batch_size), build_train_resizer(self.data)
        schedule = TrainBatchSchedule(
            order, lambda step: window.image_size, [False] * sizing.num_draws, 0, lambda draws: draws, steps_per_draw=16
        )
        return BatchPlanner(self.source, schedule, sizing, None).batches(0, 1 << 40)


@dataclass(frozen=True)
class CopyCeiling:
    """Copy pixels of finished images between buffers on one core, as the cheapest loader would."""

    channels: int
    name: str = "ceiling: memcpy"
    cores: int = 1

    def measure(self, window: MeasurementWindow, cache: CacheState) -> LoaderMeasurement:
        """Measure it in this process."""
        counted = count_images(self._iter_batch_sizes(window), window.seconds, 2)
        return counted.to_measurement(counted.images * self.channels * window.image_size**2, 0)

    def _iter_batch_sizes(self, window: MeasurementWindow) -> Iterator[int]:
        batch_bytes = window.batch_size * self.channels * window.image_size**2
        batches = max(2, _COPIED_BYTES // batch_bytes)
        images = np.zeros((batches, batch_bytes), dtype=np.uint8)
        images[:] = 1  # map every page
        out = np.zeros(batch_bytes, dtype=np.uint8)
        while True:
            for batch in images:
                np.copyto(out, batch)
                yield window.batch_size
