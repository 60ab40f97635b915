"""Capture device work as a graph, and replay it in one call.

A CUDA graph (https://docs.nvidia.com/cuda/cuda-c-programming-guide/#cuda-graphs) holds kernels and the addresses that
they read and write, but no host code.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Protocol

import torch
from torch import Tensor


class DeviceGraph(Protocol):
    """Captured device work."""

    def capture(self, work: Callable[[], Tensor]) -> Tensor:
        """Call `work` to record its device work without running it; return its result, which each replay overwrites.

        Raise `RuntimeError` if the work synchronizes with the device.
        """
        ...

    def replay(self) -> None:
        """Run the recorded work on the current contents of its inputs."""
        ...


class GraphPool(Protocol):
    """Create graphs on one device that share memory, as they never run concurrently."""

    def capture_stream(self) -> AbstractContextManager[None]:
        """Return a context whose work runs on the capture stream, for warm-up."""
        ...

    def new_graph(self) -> DeviceGraph:
        """Return an empty graph."""
        ...


class CudaGraphPool:
    """CUDA graphs of the current device, captured on a separate stream.

    The context `capture_stream` synchronizes with the current stream on both ends
    (https://docs.pytorch.org/docs/stable/notes/cuda.html#whole-network-capture).
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._pool: Any = torch.cuda.graph_pool_handle()

    @contextmanager
    def capture_stream(self) -> Iterator[None]:
        """Return a context whose work runs on the capture stream."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)

    def new_graph(self) -> DeviceGraph:
        """Return an empty CUDA graph."""
        return _CudaGraph(self._stream, self._pool)


def build_graph_pool(device: torch.device) -> GraphPool | None:
    """Return the graph pool of `device`, or None if it has no graphs."""
    return CudaGraphPool() if device.type == "cuda" else None


_FAILED_GRAPHS: list[Any] = []
"""Graphs whose capture failed, kept alive: torch 2.11's pinned-memory allocator may still query their stream."""


class _CudaGraph:
    """A CUDA graph. Other threads, such as those that pin batches, may run during its capture."""

    def __init__(self, stream: torch.cuda.Stream, pool: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._stream = stream
        self._pool = pool

    def capture(self, work: Callable[[], Tensor]) -> Tensor:
        """Call `work` on the capture stream; return its result."""
        current = torch.cuda.current_stream()
        try:
            with torch.cuda.graph(self._graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                return work()
        except BaseException:
            torch.cuda.set_stream(current)  # torch does not restore it if the end of a capture fails
            self._clean_up_failed_capture()
            raise

    def replay(self) -> None:
        """Launch the graph on the current stream."""
        self._graph.replay()

    def _clean_up_failed_capture(self) -> None:
        """Clean up after a failed capture, as torch itself does from 2.13 on.

        Before, the allocator considers the capture unfinished, so memory is never freed and `torch.cuda.empty_cache`
        fails, and the device's generator refuses to draw; it gets a new state with the same sequence. Earlier graphs
        keep the old one.
        """
        device = torch.cuda.current_device()
        _FAILED_GRAPHS.append(self._graph)
        with suppress(RuntimeError):
            self._graph.reset()
        with suppress(AttributeError, RuntimeError):  # already ended, memory already released
            torch._C._cuda_endAllocateToPool(device, self._pool)
            torch._C._cuda_releasePool(device, self._pool)
        with suppress(RuntimeError):
            generator, fresh = torch.cuda.default_generators[device], torch.Generator(f"cuda:{device}")
            fresh.set_state(generator.get_state())
            generator.graphsafe_set_state(fresh.graphsafe_get_state())
