"""Loader for a split of raw pixels that lies in device memory: gather and augment there, without loading."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchvision.transforms.v2 import functional as F

from paceline.core.dataset import ArraySource
from paceline.core.results import LoaderResult
from paceline.data.augment.protocol import Augment
from paceline.data.batch import Batch
from paceline.data.laps import Laps
from paceline.data.schedule import Schedule
from paceline.data.tally import Tally

# Samples whose indices and draws are copied to the device together, so that many steps share one copy.
_AT_ONCE: Final = 1 << 15


class Resident(NamedTuple):
    """A split in device memory: uint8 images [M, C, H, W], int64 labels [M]."""

    images: Tensor
    labels: Tensor


class _Laid(NamedTuple):
    indices: NDArray[np.int64]
    draws: NDArray[np.float64]
    device_indices: Tensor
    device_draws: Tensor


@dataclass(frozen=True)
class DeviceLoader:
    """Make each batch on demand on the device of `resident`; the host sends only indices and draws."""

    resident: Resident
    schedule: Schedule
    changes: Sequence[Augment]
    tally: Tally
    laps: Laps
    _laid: dict[int, _Laid] = field(default_factory=dict, repr=False, compare=False)

    def batches(self, first: int, stop: int) -> Iterator[Batch]:
        """Return an iterator over the batches."""
        for number in range(first, stop):
            self.tally.ask(num_ready=0)
            self.laps.begin()
            batch = self._made(number, stop)
            self.tally.hand(self.laps.finish(len(batch), batch.images.nbytes))
            yield batch

    def stats(self) -> LoaderResult | None:
        """Return the timing of all batches so far, by the host's clock."""
        return self.tally.stats()

    def close(self) -> None:
        """Do nothing: nothing is prefetched."""

    def _made(self, number: int, stop: int) -> Batch:
        if number not in self._laid:
            self._lay(number, stop)
        indices, draws, device_indices, device_draws = self._laid.pop(number)
        self.laps.lap("augment")
        images = self.resident.images.index_select(0, device_indices)
        labels = self.resident.labels.index_select(0, device_indices)
        self.laps.got(images.nbytes)
        size = self.schedule.size(number)
        if images.shape[-2:] != (size, size):
            images = F.resize(images, [size, size], antialias=True)
            self.laps.lap("decode")
        used = 0
        for change in self.changes:
            mine = slice(used, used + change.num_draws)
            images = change(images, torch.from_numpy(draws[:, mine]) if change.needs_host else device_draws[:, mine])
            used += change.num_draws
        self.laps.lap("augment")
        return Batch(images, labels, indices, device_draws[:, used:])

    def _lay(self, number: int, stop: int) -> None:
        self._laid.clear()
        per_batch = max(1, len(self.schedule.indices(number)))
        numbers = range(number, min(stop, number + max(1, _AT_ONCE // per_batch)))
        indices = [self.schedule.indices(each) for each in numbers]
        draws = [self.schedule.draws(each) for each in numbers]
        device, lengths = self.resident.images.device, [len(each) for each in indices]
        device_indices = torch.split(_sent(np.concatenate(indices), device), lengths)
        device_draws = torch.split(_sent(np.concatenate(draws), device), lengths)
        laid = zip(indices, draws, device_indices, device_draws, strict=True)
        self._laid.update(zip(numbers, (_Laid(*each) for each in laid), strict=True))


def reside(source: ArraySource, device: torch.device) -> Resident:
    """Copy all of `source` to `device`."""
    images = torch.from_numpy(np.asarray(source.images)).to(device)
    return Resident(images.permute(0, 3, 1, 2).contiguous(), torch.from_numpy(source.labels).to(device))


def _sent(values: NDArray[np.int64] | NDArray[np.float64], device: torch.device) -> Tensor:
    tensor = torch.from_numpy(values)
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)
