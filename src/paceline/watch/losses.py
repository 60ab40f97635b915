"""Keep the loss of each observed step, without ever waiting for a GPU."""

from collections import deque
from typing import Any, Final, final

MAX_UNREAD: Final = 256
"""Steps whose losses may be unread; the host is never so far ahead of a GPU."""


@final
class LossRecorder:
    """Losses of the open step, and of those that the GPU has not completed.

    A step's loss is the sum over its micro-batches of the values from which backward starts.
    """

    def __init__(self) -> None:
        self._open: list[tuple[Any, Any]] = []
        self._unread: deque[tuple[int, list[tuple[Any, Any]]]] = deque(maxlen=MAX_UNREAD)

    def add(self, torch: Any, tensors: Any) -> None:
        """Keep the values of the tensors, or of the tensor, of a backward; those with several elements have no loss."""
        for tensor in tensors if isinstance(tensors, list | tuple) else (tensors,):
            if not isinstance(tensor, torch.Tensor) or tensor.numel() != 1:
                continue
            if tensor.device.type == "cpu":
                self._open.append((tensor.detach().item(), None))
            elif tensor.is_cuda and not torch.cuda.is_current_stream_capturing():
                # `item` would wait for all that the host has queued; a copy to pinned memory is queued itself.
                value = torch.empty((), dtype=tensor.dtype, device="cpu", pin_memory=True)
                value.copy_(tensor.detach().reshape(()), non_blocking=True)
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(tensor.device))
                self._open.append((value, event))

    def end_step(self, n: int) -> None:
        """End step `n`: its losses are those kept since the step before."""
        if self._open:
            self._unread.append((n, self._open))
            self._open = []

    def read_completed(self) -> list[tuple[int, float]]:
        """Return the losses of the steps that the device has completed, by number, each once."""
        completed: list[tuple[int, float]] = []
        while self._unread and all(event is None or event.query() for _, event in self._unread[0][1]):
            n, values = self._unread.popleft()
            completed.append((n, sum(float(value) for value, _ in values)))
        return completed
