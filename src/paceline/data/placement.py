"""Copy batches to the device and normalize images there."""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.data.batch import Batch
from paceline.data.bus import TransferStats, build_device_copy


class DeviceBatch(NamedTuple):
    """A batch on the device: uint8 images [N, C, H, W], int64 labels [N], float64 draws [N, D] (D may be 0)."""

    images: Tensor
    labels: Tensor
    draws: Tensor


class DeviceTransfer:
    """Copy batches to `device` as uint8, and normalize them there to `dtype`.

    `mean` and `std` are per channel, of pixels in [0, 1]. With `timed`, copies to a GPU are timed.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        memory_format: torch.memory_format,
        *,
        timed: bool = False,
    ) -> None:
        self.mean = mean
        self.device = device
        self._copy = build_device_copy(device, timed=timed)
        self._dtype = dtype
        self._memory_format = memory_format
        shape = (1, len(mean), 1, 1)
        # uint8 is a quarter of the bytes of float32. 16-bit types are computed in float32 and rounded once.
        self._compute_dtype = torch.promote_types(dtype, torch.float32)
        self._mean = torch.tensor(mean, device=device, dtype=self._compute_dtype).mul_(255).view(shape)
        self._scale = torch.tensor(std, device=device, dtype=self._compute_dtype).mul_(255).reciprocal_().view(shape)

    def __call__(self, batch: Batch) -> DeviceBatch:
        """Copy a batch to the device, without waiting if its memory is page-locked."""
        return DeviceBatch(*self._copy.send((batch.images, batch.labels, batch.draws)))

    def stats(self, skip: int) -> TransferStats:
        """Return the transfer totals; timing leaves out the first `skip` batches."""
        return self._copy.stats(skip)

    def to_device(self, batch: Batch) -> Batch:
        """Return the batch with its tensors on the device, so that copying it again costs nothing."""
        images, labels, draws = self(batch)
        return replace(batch, images=images, labels=labels, draws=draws)

    def normalize(self, images: Tensor) -> Tensor:
        """Return `dtype` [N, C, H, W]: (pixels / 255 - mean) / std per channel, in the model's memory format."""
        floats = images.to(self._compute_dtype, memory_format=self._memory_format)
        return floats.sub_(self._mean).mul_(self._scale).to(self._dtype)
