"""Record what a device is asked for, once, and ask for all of it again in one call.

A CUDA graph (https://docs.nvidia.com/cuda/cuda-c-programming-guide/#cuda-graphs) holds kernels and the addresses they
read and write; what a host computes or decides on the way is not in it. Knows nothing of steps.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Protocol

import torch
from torch import Tensor


class Graph(Protocol):
    """Some work on a device, to be carried out again and again."""

    def capture(self, work: Callable[[], Tensor]) -> Tensor:
        """Call `work` to record what it asks of the device, none of which is carried out; return what it returns.

        Each replay fills that tensor anew. Raise `RuntimeError` where the work waits for the device or asks for its
        numbers.
        """
        ...

    def replay(self) -> None:
        """Carry the recorded work out, on what then lies at the addresses that it reads."""
        ...


class Graphs(Protocol):
    """Make graphs of one device, which never run side by side and so share their memory."""

    def aside(self) -> AbstractContextManager[None]:
        """Return a context whose work runs where graphs are captured, so that what starts there once has started."""
        ...

    def new(self) -> Graph:
        """Return a graph that holds nothing yet."""
        ...


class CudaGraphs:
    """Graphs of the current CUDA device, captured on a stream of their own.

    Work in the context `aside` comes after what was queued before it and before what is queued after it, as
    https://docs.pytorch.org/docs/stable/notes/cuda.html#whole-network-capture asks of the passes before a capture.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._pool: Any = torch.cuda.graph_pool_handle()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Return a context whose work runs on the stream of the captures."""
        here = torch.cuda.current_stream()
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            yield
        here.wait_stream(self._stream)

    def new(self) -> Graph:
        """Return an empty CUDA graph."""
        return _CudaGraph(self._stream, self._pool)


def build_graphs(device: torch.device) -> Graphs | None:
    """Return what captures work of `device`, or None where it has no graphs."""
    return CudaGraphs() if device.type == "cuda" else None


_ABANDONED: list[Any] = []
"""Graphs whose capture failed: torch 2.11's allocator of pinned memory may go on asking them for their stream."""


class _CudaGraph:
    """One CUDA graph. Other threads, such as those that pin batches, go on while it is captured."""

    def __init__(self, stream: torch.cuda.Stream, pool: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._stream = stream
        self._pool = pool

    def capture(self, work: Callable[[], Tensor]) -> Tensor:
        """Call `work` on the capturing stream; return what it returns."""
        here = torch.cuda.current_stream()
        try:
            with torch.cuda.graph(self._graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                return work()
        except BaseException:
            torch.cuda.set_stream(here)  # torch stays where it was when the end of a capture fails
            self._abandon()
            raise

    def replay(self) -> None:
        """Launch the graph on the current stream."""
        self._graph.replay()

    def _abandon(self) -> None:
        """Put right what a capture leaves behind where its end fails, which torch itself does from 2.13 on.

        Before, the allocator takes it to go on for ever, so memory that another stream has read never comes back and
        `torch.cuda.empty_cache` fails; and the generator of the device refuses to draw, so it gets a state that has the
        same numbers to come and knows of no capture. Graphs captured earlier are left with the old one.
        """
        device = torch.cuda.current_device()
        _ABANDONED.append(self._graph)
        with suppress(RuntimeError):
            self._graph.reset()
        with suppress(AttributeError, RuntimeError):  # it has ended, and the memory has been given back
            torch._C._cuda_endAllocateToPool(device, self._pool)
            torch._C._cuda_releasePool(device, self._pool)
        with suppress(RuntimeError):
            generator, fresh = torch.cuda.default_generators[device], torch.Generator(f"cuda:{device}")
            fresh.set_state(generator.get_state())
            generator.graphsafe_set_state(fresh.graphsafe_get_state())
