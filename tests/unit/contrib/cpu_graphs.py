"""Graphs of a CPU: what stands in for CUDA's where there is no GPU, and is as strict.

Every operation below autograd is written down with the tensors it read and wrote. A capture leaves nothing behind, as
nothing of a CUDA graph is carried out while it is captured: what the work wrote to is put back, and torch's generator
too. A replay repeats the
operations on the same memory, with the numbers that the host gave then, so a number that the host would change between
steps stands still here too. Asking for the value of a tensor is an error, as it is while a stream is captured.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paceline.contrib.cuda_graphs import CudaGraph, CudaGraphPool

aten = torch.ops.aten
ASKS_FOR_VALUES = (aten._local_scalar_dense, aten.nonzero, aten.equal, aten.is_nonzero)
RUNNING_STATISTICS = slice(3, 5)
"""Arguments that `native_batch_norm` writes to without its signature saying so."""


class Recorder(TorchDispatchMode):
    """Write operations down, and remember what was in the memory that they write to and that was there before."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], None]] = []
        self._made: set[int] = set()
        self._before: dict[int, tuple[Tensor, Tensor]] = {}
        self._alive: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._overloadpacket in ASKS_FOR_VALUES:
            raise RuntimeError("operation not permitted when stream is capturing")
        written = _written(func, args, kwargs)
        for tensor in written:
            self._remember(tensor)
        out = func(*args, **kwargs)
        read = {_memory(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        made = [each for each in tree_leaves(out) if isinstance(each, Tensor) and _memory(each) not in read]
        self._made |= {_memory(each) for each in made}
        self._alive.append((args, kwargs, out))
        if made or written:
            self.calls.append(lambda: _repeat(func, args, kwargs, made, out))
        return out

    def put_back(self) -> None:
        """Undo what was written to memory that was there before."""
        for whole, before in self._before.values():
            whole.copy_(before)

    def _remember(self, tensor: Tensor) -> None:
        memory = _memory(tensor)
        if memory not in self._made and memory not in self._before:
            whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            self._before[memory] = whole, whole.clone()


class Recorded(CudaGraph):
    """A graph of a CPU."""

    def __init__(self) -> None:
        self._calls: list[Callable[[], None]] = []

    def capture(self, work: Callable[[], Tensor]) -> Tensor:
        recorder = Recorder()
        try:
            with recorder, torch.random.fork_rng(devices=[]):
                found = work()
        finally:
            recorder.put_back()
        assert len(recorder.calls) > 20, "hardly anything was recorded"
        self._calls = recorder.calls
        return found

    @torch.no_grad()
    def replay(self) -> None:
        for call in self._calls:
            call()


class RecordedGraphs(CudaGraphPool):
    """Graphs of a CPU, and how many were made and replayed."""

    def __init__(self) -> None:
        self.made: list[Recorded] = []

    def capture_stream(self) -> AbstractContextManager[None]:
        return nullcontext()

    def new_graph(self) -> Recorded:
        self.made.append(Recorded())
        return self.made[-1]


def _repeat(func: Any, args: Any, kwargs: Any, made: list[Tensor], out: Any) -> None:
    again = func(*args, **kwargs)
    if made:
        pairs = zip(tree_leaves(out), tree_leaves(again), strict=True)
        for first, second in pairs:
            if any(first is each for each in made):
                first.copy_(second)


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    values = [*args, *kwargs.values()]
    if func._overloadpacket is aten.native_batch_norm:
        values = list(args[RUNNING_STATISTICS])
    else:
        names = [each.name for each in func._schema.arguments]
        by_name = dict(zip(names, args, strict=False)) | kwargs
        is_written = {
            each.name: each.alias_info is not None and each.alias_info.is_write for each in func._schema.arguments
        }
        values = [value for name, value in by_name.items() if is_written[name]]
    return [each for each in tree_leaves(values) if isinstance(each, Tensor)]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
