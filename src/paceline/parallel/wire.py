"""How long each bucket of gradients takes from ready to averaged, where that is asked for.

Nothing is timed otherwise, and without compression torch's own path is left as it is. A bucket is timed around what
sends it: by the host's clock, or on a GPU by events in the streams, which are read when they are complete.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol, final

import torch
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from paceline.core.results import BucketResult
from paceline.parallel.compression import SendBucket, build_send_bucket
from paceline.parallel.memory import CommState, NoCommState
from paceline.recipe.schema.parallel import Parallel


@dataclass(frozen=True)
class CommTimes:
    """What averaging gradients took, in means over `n` steps.

    `wire_s` is from the first bucket of a step being ready to the last being averaged, in seconds; other ranks'
    lateness is part of it. `buckets` come in the order in which they are sent.
    """

    wire_s: float
    buckets: tuple[BucketResult, ...]
    n: int


class CommHook(Protocol):
    """Decide how a wrapped model sends its gradients."""

    def attach(self, replica: DistributedDataParallel) -> None:
        """Change how `replica` sends, once, before the first step."""
        ...

    def times(self) -> CommTimes | None:
        """Return what was measured so far; None where nothing was. Waits for the device."""
        ...

    def state(self) -> CommState:
        """Return what sending keeps between steps."""
        ...

    def reset(self) -> None:
        """Forget all passes so far: they were rehearsals."""
        ...


def build_comm_hook(
    section: Parallel, device: torch.device, now: Callable[[], float] | None, warmup_steps: int = 0
) -> CommHook:
    """Return how gradients are sent, and timed where `now` (seconds) is given, after `warmup_steps` steps."""
    if now is None and section.compression == "off":
        return NoCommHook()
    send, memory = build_send_bucket(section)
    if now is None:
        return UntimedCommHook(send, memory)
    moments: Timestamps = CudaTimestamps() if device.type == "cuda" else HostTimestamps(now)
    return TimedCommHook(send, memory, moments, warmup_steps)


@final
class NoCommHook:
    """Send gradients as torch does without being told."""

    def attach(self, replica: DistributedDataParallel) -> None:
        """Change nothing."""

    def times(self) -> CommTimes | None:
        """Return None."""
        return None

    def state(self) -> CommState:
        """Return that of nothing."""
        return NoCommState()

    def reset(self) -> None:
        """Change nothing."""


@final
class UntimedCommHook:
    """Send gradients by `send`, untimed; `state` is what that keeps."""

    def __init__(self, send: SendBucket, memory: CommState) -> None:
        self._send = send
        self._comm_state = memory

    def attach(self, replica: DistributedDataParallel) -> None:
        """Give each bucket to `send`."""
        replica.register_comm_hook(None, self._hook)

    def times(self) -> CommTimes | None:
        """Return None."""
        return None

    def state(self) -> CommState:
        """Return what `send` keeps."""
        return self._comm_state

    def reset(self) -> None:
        """Have `send` begin anew."""
        self._comm_state.reset()

    def _hook(self, state: object, bucket: GradBucket) -> Future[Tensor]:
        return self._send(bucket)[0]


class Timestamps(Protocol):
    """Tell when something was reached, without waiting for it."""

    def mark(self) -> Any:
        """Return this moment: when the current stream will have done what is queued on it."""
        ...

    def is_reached(self, mark: Any) -> bool:
        """Return whether it has been reached."""
        ...

    def seconds(self, start: Any, end: Any) -> float:
        """Return the seconds between two moments that have been reached."""
        ...

    def synchronize(self) -> None:
        """Wait until all marks have been reached."""
        ...


@final
class HostTimestamps:
    """Moments of a device that never runs behind the host, by the clock `now`, in seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now

    def mark(self) -> Any:
        """Return the time."""
        return self._now()

    def is_reached(self, mark: Any) -> bool:
        """Return True."""
        return True

    def seconds(self, start: Any, end: Any) -> float:
        """Return the difference."""
        return float(end - start)

    def synchronize(self) -> None:
        """Return at once."""


@final
class CudaTimestamps:
    """Moments on a GPU: events in the current stream, which is that of the gradients where a bucket is ready.

    What torch calls when a bucket is averaged, it calls with a stream of its own, which waits for the collective.
    """

    def mark(self) -> Any:
        """Record an event."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def is_reached(self, mark: Any) -> bool:
        """Return whether the device has come to the event."""
        return bool(mark.query())

    def seconds(self, start: Any, end: Any) -> float:
        """Return the seconds between two events."""
        return float(start.elapsed_time(end)) / 1e3

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize()


@dataclass
class _SentBucket:
    """A bucket on its way; `done` is None until it is averaged."""

    num_bytes: int
    ready: Any
    done: Any = None


@dataclass
class _BucketSums:
    """Sums over `n` steps, in seconds, with one entry a bucket in `ready_s` and `took_s`; `sizes` are their bytes."""

    sizes: tuple[int, ...] = ()
    ready_s: list[float] = field(default_factory=list)
    took_s: list[float] = field(default_factory=list)
    wire_s: float = 0.0
    n: int = 0


@final
class TimedCommHook:
    """Send gradients by `send`, and time each bucket.

    The first `warmup_steps` steps are left out, and so is what came before a change of the buckets: torch groups
    parameters anew after the first step, and PowerSGD begins to compress after some. Memory does not grow with steps.
    """

    def __init__(self, send: SendBucket, memory: CommState, moments: Timestamps, warmup_steps: int = 0) -> None:
        self._send = send
        self._comm_state = memory
        self._timestamps = moments
        self._warmup_steps = self._warmup_left = warmup_steps
        self._open: list[_SentBucket] = []
        self._unread: deque[list[_SentBucket]] = deque()
        self._sums = _BucketSums()

    def attach(self, replica: DistributedDataParallel) -> None:
        """Give each bucket to `send`, and note when it is ready and when it is averaged."""
        replica.register_comm_hook(None, self._hook)

    def times(self) -> CommTimes | None:
        """Return the means so far, or None where no step has been counted."""
        self._timestamps.synchronize()
        self._read()
        sums = self._sums
        if not sums.n:
            return None
        buckets = zip(sums.sizes, sums.ready_s, sums.took_s, strict=True)
        return CommTimes(
            wire_s=sums.wire_s / sums.n,
            buckets=tuple(
                BucketResult(bytes=size, ready_s=ready_s / sums.n, wire_s=took_s / sums.n, n=sums.n)
                for size, ready_s, took_s in buckets
            ),
            n=sums.n,
        )

    def state(self) -> CommState:
        """Return what `send` keeps."""
        return self._comm_state

    def reset(self) -> None:
        """Have `send` begin anew, and the warm-up and the sums."""
        self._comm_state.reset()
        self._warmup_left = self._warmup_steps
        self._unread.clear()
        self._sums = _BucketSums()

    def _hook(self, state: object, bucket: GradBucket) -> Future[Tensor]:
        if bucket.index() == 0:
            self._open = []
        sent = _SentBucket(0, self._timestamps.mark())
        self._open.append(sent)
        averaged, sent.num_bytes = self._send(bucket)
        if bucket.is_last():
            self._read()
            self._unread.append(self._open)

        def note(future: Future[Tensor]) -> Tensor:
            sent.done = self._timestamps.mark()
            return future.value()

        return averaged.then(note)

    def _read(self) -> None:
        """Add up the steps whose buckets have all been averaged."""
        while self._unread and all(each.done is not None and self._is_averaged(each) for each in self._unread[0]):
            step = self._unread.popleft()
            if self._warmup_left:
                self._warmup_left -= 1
            else:
                self._add(step)

    def _is_averaged(self, sent: _SentBucket) -> bool:
        return self._timestamps.is_reached(sent.ready) and self._timestamps.is_reached(sent.done)

    def _add(self, step: list[_SentBucket]) -> None:
        sizes = tuple(each.num_bytes for each in step)
        if sizes != self._sums.sizes:
            self._sums = _BucketSums(sizes, [0.0] * len(sizes), [0.0] * len(sizes))
        sums, first = self._sums, step[0].ready
        for number, each in enumerate(step):
            sums.ready_s[number] += self._timestamps.seconds(first, each.ready)
            sums.took_s[number] += self._timestamps.seconds(each.ready, each.done)
        sums.wire_s += max(self._seconds_to(first, step))
        sums.n += 1

    def _seconds_to(self, first: Any, step: list[_SentBucket]) -> Iterable[float]:
        return (self._timestamps.seconds(first, each.done) for each in step)
