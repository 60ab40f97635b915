"""Count the memory that work on tensors allocates, and read how much a rank may still allocate."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from paceline.core.host import free_memory_bytes
from paceline.measure.caching_allocator import Allocator, Block, ExactAllocator

_HEAP_FACTOR: Final = 2.0
"""Resident memory per counted byte of activations: the C library keeps freed blocks. The peak of two steps grew by 1.4
(ResNet-50, 4 to 16 images of 128 px) to 2.0 times the count (ResNet-18, 2 to 64 images of 112 px), measured by
`memory.host_bytes` of a run per size."""
_HOST_SHARE: Final = 0.8
"""Share of the free host memory that training may use: the rest is for logs, checkpoints and evaluation."""
DEVICE_SHARE: Final = 0.9
"""Share of the free device memory: the rest is for fragments, NCCL and the kernels' workspaces."""


class Allocated(NamedTuple):
    """Bytes that work has allocated: at its peak, and still at its end."""

    peak: int
    kept: int


MeasureMemory = Callable[[Callable[[], object]], Allocated]
"""Run work on the model's device, and return what it allocates beyond what was allocated before."""


class StorageCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count the bytes of the storages that operations create, while they live.

    `allocator` says how many each takes, by default its own. With `device_type` only storages of such devices count.
    Each is of the `kind` that was set when it was created, or that `set_kind` has given it: `parts_at_peak` are their
    bytes. `stream` is that of the allocator on which storages are created.
    """

    def __init__(self, allocator: Allocator | None = None, *, device_type: str | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._allocator = allocator or ExactAllocator()
        self._device_type = device_type
        self._live: dict[int, tuple[Block | None, str]] = {}
        self._parts: Counter[str] = Counter()
        self.kind, self.stream = "", 0
        self.parts_at_peak: dict[str, int] = {}
        self.kept = self.peak = 0

    def set_kind(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Count `tensors` as `kind` from now on; those that were not counted yet are added."""
        for tensor in self._iter_counted(list(tensors)):
            self._add(tensor)
            address = tensor.untyped_storage()._cdata
            block, before = self._live[address]
            self._live[address] = block, kind
            self._parts[before] -= block.num_bytes if block else 0
            self._parts[kind] += block.num_bytes if block else 0

    def reset_peak(self) -> None:
        """Forget the peak so far."""
        self.peak, self.parts_at_peak = self.kept, dict(self._parts)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count its outputs."""
        for tensor in self._iter_counted((args, kwargs)):
            self._add(tensor, from_before=True)
        output = func(*args, **(kwargs or {}))
        for tensor in self._iter_counted(output):
            self._add(tensor)
        return output

    def _iter_counted(self, values: Any) -> Iterator[Tensor]:
        for value in tree_iter(values):
            if isinstance(value, Tensor) and self._device_type in (None, value.device.type):
                yield value

    def _add(self, tensor: Tensor, *, from_before: bool = False) -> None:
        storage = tensor.untyped_storage()
        address = storage._cdata  # of the C++ object, which views share
        if address in self._live:
            return
        is_counted = not from_before and storage.nbytes() > 0
        block = self._allocator.allocate(storage.nbytes(), self.stream) if is_counted else None
        self._live[address] = block, self.kind
        if block:
            self._parts[self.kind] += block.num_bytes
            self.kept += block.num_bytes
            if self.kept > self.peak:
                self.peak, self.parts_at_peak = self.kept, dict(self._parts)
        weakref.finalize(storage, self._drop, address)

    def _drop(self, address: int) -> None:
        block, kind = self._live.pop(address)
        if block:
            self.kept -= block.num_bytes
            self._parts[kind] -= block.num_bytes
            self._allocator.free(block)


def count_host_bytes(work: Callable[[], object]) -> Allocated:
    """Run `work` on the CPU and count its tensors, without temporary memory inside of operations."""
    with StorageCounter() as counter:
        work()
    return Allocated(round(_HEAP_FACTOR * counter.peak), counter.kept)


def read_device_bytes(work: Callable[[], object]) -> Allocated:
    """Run `work` on the current GPU and read its allocator's statistics. Raise `torch.OutOfMemoryError` if it fails."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    return Allocated(torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before)


def device_limit(device: torch.device) -> int:
    """Return the bytes of a GPU that this process may allocate."""
    total = torch.cuda.mem_get_info(device)[1]
    return int(torch.cuda.get_per_process_memory_fraction(device) * total)


def memory_budget(device: torch.device, local_ranks: int) -> int:
    """Return the bytes that one of `local_ranks` ranks may allocate for training on `device`, with a margin."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free = min(torch.cuda.mem_get_info(device)[0], device_limit(device) - torch.cuda.memory_reserved(device))
        return max(0, int(DEVICE_SHARE * free))
    return max(0, int(_HOST_SHARE * free_memory_bytes() / local_ranks))
