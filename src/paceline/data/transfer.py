"""Copy batches from host memory to the device, and normalize images there.

Copies are counted and, on a GPU, can be timed. The clock's stage `h2d` is shorter: the time that a step waits for its
copies, which overlap the previous step.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from paceline.core.pixels import FULL_SCALE, PixelType
from paceline.data.batch import Batch

# The most recent copies are timed individually, with two events each; the oldest pair is reused.
MAX_TIMED_COPIES: Final = 1000


@dataclass(frozen=True)
class TransferStats:
    """Totals of a transfer."""

    sends: int = 0
    bytes: int = 0
    copied_bytes: int = 0  # to another device
    timed_bytes: int = 0  # 0 without timing
    timed_s: float = 0.0  # that the device took for `timed_bytes`


@dataclass
class CopyEvents:
    """Pairs of CUDA events around the most recent copies of a stream.

    `new_event` builds one, as `torch.cuda.Event(enable_timing=True)` does.
    """

    new_event: Callable[[], Any]
    _timed: deque[tuple[int, int, Any, Any]] = field(default_factory=deque)

    def begin(self) -> tuple[Any, Any]:
        """Record the first of a pair of events on the current stream; return both."""
        is_full = len(self._timed) >= MAX_TIMED_COPIES
        events = self._timed.popleft()[2:] if is_full else (self.new_event(), self.new_event())
        events[0].record()
        return events

    def end(self, events: tuple[Any, Any], number: int, num_bytes: int) -> None:
        """Record the second event after send `number`, counted from 1, has copied `num_bytes`."""
        events[1].record()
        self._timed.append((number, num_bytes, *events))

    def total(self, skip: int) -> tuple[int, float]:
        """Return (bytes, seconds) of the timed copies after the first `skip` sends; waits for the last one."""
        copies = [(num_bytes, start, end) for number, num_bytes, start, end in self._timed if number > skip]
        if copies:
            copies[-1][2].synchronize()  # copies of one stream end in order; `elapsed_time` needs finished events
        return sum(each[0] for each in copies), sum(start.elapsed_time(end) / 1e3 for _, start, end in copies)


class DeviceCopy:
    """Copy tensors to a device: to a GPU on a separate stream, so that the copy overlaps the previous step."""

    def __init__(self, device: torch.device, *, timed: bool = False) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._sends = 0
        self._bytes = 0
        self._events = CopyEvents(partial(torch.cuda.Event, enable_timing=True)) if timed and self._stream else None

    def send(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors on the device, without waiting for copies from page-locked memory."""
        if all(tensor.is_cuda for tensor in tensors):
            return list(tensors)  # do not touch any stream: a CUDA graph may be capturing
        num_bytes = sum(tensor.nbytes for tensor in tensors if not tensor.is_cuda)
        self._sends += 1
        self._bytes += num_bytes
        if self._stream is None:  # on the CPU nothing is copied
            return [tensor.to(self._device, non_blocking=True) for tensor in tensors]
        current = torch.cuda.current_stream(self._device)
        # The host runs about one step ahead of the GPU (`training.nonfinite`), so this copy overlaps the previous step.
        with torch.cuda.stream(self._stream):
            events = self._events.begin() if self._events else None
            sent = [tensor.to(self._device, non_blocking=True) for tensor in tensors]
            if self._events and events:
                self._events.end(events, self._sends, num_bytes)
        current.wait_stream(self._stream)  # on the GPU: the host does not wait
        for tensor, copy in zip(tensors, sent, strict=True):
            if copy is not tensor:
                copy.record_stream(current)  # else the allocator could reuse the memory before `current` has read it
        return sent

    def stats(self, skip: int) -> TransferStats:
        """Wait for pending copies, and return the totals so far; timing leaves out the first `skip` sends."""
        timed = self._events.total(skip) if self._events else (0, 0.0)
        return TransferStats(self._sends, self._bytes, 0 if self._device.type == "cpu" else self._bytes, *timed)


class DeviceBatch(NamedTuple):
    """A batch on the device: images [N, C, H, W] as in `Batch`, int64 labels [N], float64 draws [N, D] (D may be 0)."""

    images: Tensor
    labels: Tensor
    draws: Tensor


class DeviceTransfer:
    """Copy batches to `device` as they are, and normalize them there to `dtype`.

    `mean` and `std` are per channel, of `pixels` divided by `FULL_SCALE`: batches of uint8 hold pixels, those of wider
    types are float32 and divided already.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        memory_format: torch.memory_format,
        *,
        pixels: PixelType = "uint8",
        timed: bool = False,
    ) -> None:
        self.mean = mean
        self.std = std
        self.pixels = pixels
        self.device = device
        self._copy = DeviceCopy(device, timed=timed)
        self._dtype = dtype
        self._memory_format = memory_format
        shape = (1, len(mean), 1, 1)
        # 16-bit types are computed in float32 and rounded once.
        self._compute_dtype = torch.promote_types(dtype, torch.float32)
        scale = FULL_SCALE[pixels] if pixels == "uint8" else 1
        self._mean = torch.tensor(mean, device=device, dtype=self._compute_dtype).mul_(scale).view(shape)
        self._scale = torch.tensor(std, device=device, dtype=self._compute_dtype).mul_(scale).reciprocal_().view(shape)

    def __call__(self, batch: Batch) -> DeviceBatch:
        """Copy a batch, without waiting if its memory is page-locked."""
        # As uint8: a quarter of the bytes of float32.
        return DeviceBatch(*self._copy.send((batch.images, batch.labels, batch.draws)))

    def stats(self, skip: int) -> TransferStats:
        """Return the totals; timing leaves out the first `skip` batches."""
        return self._copy.stats(skip)

    def to_device(self, batch: Batch) -> Batch:
        """Return the batch with its tensors on the device."""
        images, labels, draws = self(batch)
        return replace(batch, images=images, labels=labels, draws=draws)

    def normalize(self, images: Tensor) -> Tensor:
        """Return `dtype` [N, C, H, W]: (scaled pixels - mean) / std per channel, in the model's memory format."""
        # A copy: float32 images, which `to` would return unchanged, are normalized in place.
        floats = images.to(self._compute_dtype, memory_format=self._memory_format, copy=True)
        return floats.sub_(self._mean).mul_(self._scale).to(self._dtype)
