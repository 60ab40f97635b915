"""Loader for raw pixels in device memory: gather and augment there."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as F

from paceline.core.dataset import ArraySource
from paceline.core.results import LoaderResult
from paceline.data.augment.geometric import Augment
from paceline.data.batch import Batch
from paceline.data.loaders.reader import scale_pixels
from paceline.data.order import BatchSchedule
from paceline.data.timing import BatchTimer, LoaderStats

# Samples whose indices and draws are copied to the device together.
_SAMPLES_PER_COPY: Final = 1 << 15


class ResidentSplit(NamedTuple):
    """A split in device memory: images [M, C, H, W], int64 labels [M]."""

    images: Tensor
    labels: Tensor


class _BatchInputs(NamedTuple):
    indices: NDArray[np.int64]
    draws: NDArray[np.float64]
    device_indices: Tensor
    device_draws: Tensor


@dataclass(frozen=True)
class DeviceLoader:
    """Make each batch on demand on the device of `split`."""

    split: ResidentSplit
    schedule: BatchSchedule
    changes: Sequence[Augment]
    loader_stats: LoaderStats
    timer: BatchTimer
    interpolation: InterpolationMode = InterpolationMode.BILINEAR
    _inputs: dict[int, _BatchInputs] = field(default_factory=dict, repr=False, compare=False)

    def batches(self, first: int, stop: int) -> Iterator[Batch]:
        """Iterate over the batches."""
        for number in range(first, stop):
            self.loader_stats.request_batch(num_ready=0)
            self.timer.start()
            batch = self._make_batch(number, stop)
            self.loader_stats.deliver_batch(self.timer.finish(len(batch), batch.images.nbytes))
            yield batch

    def stats(self) -> LoaderResult | None:
        """Return the timing of all batches so far, by the host's clock."""
        return self.loader_stats.build_result()

    def close(self) -> None:
        """Do nothing: nothing is prefetched."""

    def _make_batch(self, number: int, stop: int) -> Batch:
        if number not in self._inputs:
            self._prefetch_inputs(number, stop)
        indices, draws, device_indices, device_draws = self._inputs.pop(number)
        self.timer.end_stage("augment")
        images = self.split.images.index_select(0, device_indices)
        labels = self.split.labels.index_select(0, device_indices)
        self.timer.end_read(images.nbytes)
        size = self.schedule.size(number)
        if images.shape[-2:] != (size, size):
            images = F.resize(images, [size, size], self.interpolation, antialias=True)
            self.timer.end_stage("decode")
        used = 0
        for change in self.changes:
            columns = slice(used, used + change.num_draws)
            own_draws = torch.from_numpy(draws[:, columns]) if change.needs_host else device_draws[:, columns]
            images = change(images, own_draws)
            used += change.num_draws
        self.timer.end_stage("augment")
        return Batch(images, labels, indices, device_draws[:, used:])

    # Only indices and draws go to the device, and many batches of them in one copy.
    def _prefetch_inputs(self, number: int, stop: int) -> None:
        self._inputs.clear()
        per_batch = max(1, len(self.schedule.indices(number)))
        numbers = range(number, min(stop, number + max(1, _SAMPLES_PER_COPY // per_batch)))
        indices = [self.schedule.indices(each) for each in numbers]
        draws = [self.schedule.draws(each) for each in numbers]
        device, lengths = self.split.images.device, [len(each) for each in indices]
        device_indices = torch.split(_copy_to_device(np.concatenate(indices), device), lengths)
        device_draws = torch.split(_copy_to_device(np.concatenate(draws), device), lengths)
        inputs = zip(indices, draws, device_indices, device_draws, strict=True)
        self._inputs.update(zip(numbers, (_BatchInputs(*each) for each in inputs), strict=True))


def load_split_to_device(source: ArraySource, device: torch.device) -> ResidentSplit:
    """Copy all of `source` to `device`."""
    images = torch.from_numpy(np.asarray(scale_pixels(source.images))).to(device)
    return ResidentSplit(images.permute(0, 3, 1, 2).contiguous(), torch.from_numpy(source.labels).to(device))


def _copy_to_device(values: NDArray[np.int64] | NDArray[np.float64], device: torch.device) -> Tensor:
    tensor = torch.from_numpy(values)
    # An asynchronous copy needs page-locked memory.
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)
