"""DDP communication hooks: time each gradient bucket, and send it as it is, in 16 bits or as PowerSGD factors.

Without timing and compression no hook is registered, and torch's own path runs unchanged.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from paceline.core.results import BucketResult
from paceline.parallel.base import CommState, NoCommState, gather_rows_on_rank_0
from paceline.recipe.schema.train import Parallel

POWERSGD_FIRST_STEP: Final = 10
"""Steps sent whole before PowerSGD begins. Torch needs 2, and its default of 1,000 would leave most of our runs
uncompressed."""

_SMALL: Final = 1e-12
_ZERO_LENGTH: Final = 1e-20
"""Added to the length of a factor before it divides, so that one of length 0 stays 0; far below `_SMALL`."""


@final
class PowerSGD:
    """Send factors of `rank` with error feedback and warm start (Vogels et al. 2019, arXiv 1905.13727).

    Of each bucket it keeps what this rank has held back, and both factors, which all ranks have alike. A bucket is
    known to torch by its number and to a checkpoint by the names of its parameters. Torch's generator is not kept: it
    is asked once a bucket, in the first compressed step, and begins from the same seed in every process.
    """

    has_state = True

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._buckets: list[list[Tensor]] = []
        self._noise: dict[int, Tensor] = {}
        self._state = self._new_state()

    def send(self, bucket: GradBucket) -> tuple[Future[Tensor], int]:
        """Return what will be the mean of a bucket's gradients over the ranks, and the bytes that this rank sends."""
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook

        state, number = self._state, bucket.index()
        self._buckets[number:] = [bucket.parameters()]  # those after it are of the pass before, and may be others
        if number in state.q_memory_dict:
            right = state.q_memory_dict[number]
            if number not in self._noise:
                self._noise[number] = _noise_like(right)
            _replace_nonfinite(state.error_dict[number])
            _replace_nonfinite(right).add_(self._noise[number])
        gradients, sent_before = bucket.buffer(), state.total_numel_after_compression
        future = powerSGD_hook(state, bucket)
        if gradients.device.type == "cpu":
            # Torch sends the second factor when the first has come, from a thread of gloo: those of two buckets could
            # go out in another order on another rank. NCCL's order is that of the host, which does not wait.
            future.wait()
        # Before the first compressed step torch counts nothing, and sends all.
        num_sent = state.total_numel_after_compression - sent_before or gradients.numel()
        return future, num_sent * gradients.element_size()

    def reset(self) -> None:
        """Begin anew, with whole steps; which buckets there are stays known."""
        self._noise.clear()
        self._state = self._new_state()

    def num_bytes(self, model: nn.Module) -> int:
        """Return the bytes of a gradient for each rank."""
        return dist.get_world_size() * sum(each.nbytes for each in model.parameters() if each.requires_grad)

    def tensors(self) -> dict[str, Tensor]:
        """Return what is held back as `NUMBER.error` [world_size, N], and the factors [N]; none before they begin."""
        rows = {number: gather_rows_on_rank_0(error) for number, error in sorted(self._state.error_dict.items())}
        found = {f"{number}.error": row for number, row in rows.items() if row is not None}
        if found:
            found |= {f"{number}.left": each for number, each in self._state.p_memory_dict.items()}
            found |= {f"{number}.right": each for number, each in self._state.q_memory_dict.items()}
        return found

    def values(self, model: nn.Module) -> dict[str, Any]:
        """Return the number of ranks, how many steps were sent, and the parameters of each bucket."""
        return {"ranks": dist.get_world_size(), "steps": self._state.iter, "buckets": self._names(model)}

    def load(self, model: nn.Module, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
        """Go on with this rank's part, or say why all ranks begin anew."""
        why = self._mismatch(model, values)
        if why:
            whole = f"it begins anew, with {POWERSGD_FIRST_STEP} whole steps"
            return f"resumed without what PowerSGD had held back: {why}; {whole}"
        state, own = self._state, dist.get_rank()
        state.iter = values["steps"]
        for number, bucket in enumerate(self._buckets if tensors else []):
            # In memory of torch's own, whose alignment the libraries that multiply may go by.
            held, left, right = (
                each.to(bucket[0].device, copy=True)
                for each in (tensors[f"{number}.error"][own], tensors[f"{number}.left"], tensors[f"{number}.right"])
            )
            state.error_dict[number], state.p_memory_dict[number], state.q_memory_dict[number] = held, left, right
        return ""

    def _mismatch(self, model: nn.Module, values: Mapping[str, Any]) -> str:
        """Return why what a checkpoint has does not go with these ranks and buckets; nothing where it does."""
        ranks = dist.get_world_size()
        if not values:
            return "the checkpoint has none of it"
        if values["ranks"] != ranks:
            return f"it was of {values['ranks']} ranks, and these are {ranks}"
        return "" if values["buckets"] == self._names(model) else "other gradients are sent together"

    def _names(self, model: nn.Module) -> list[list[str]]:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        return [[names[id(each)] for each in bucket] for bucket in self._buckets]

    def _new_state(self) -> Any:
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

        return PowerSGDState(
            None,
            matrix_approximation_rank=self._rank,
            start_powerSGD_iter=POWERSGD_FIRST_STEP,
            orthogonalization_epsilon=_ZERO_LENGTH,
        )


def _replace_nonfinite(memory: Tensor) -> Tensor:
    """Forget in place what is no number: a gradient that overflowed once must not be held back for all later steps."""
    return memory.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def _noise_like(right: Tensor) -> Tensor:
    """Return numbers too small to matter beside any but 0, the same on every rank.

    The right factors of a step are the first guess of the next. Those of a layer whose gradient was 0, as behind a
    branch that starts at zero, are 0, and no power iteration would ever leave that.
    """
    noise = torch.randn(right.shape, generator=torch.Generator().manual_seed(0))
    return noise.mul_(_SMALL).to(right.device, right.dtype)


SendBucket = Callable[[GradBucket], tuple[Future[Tensor], int]]
"""Returns what will be the mean of a bucket's gradients over the ranks, and the bytes of it that this rank sends."""


def build_send_bucket(section: Parallel) -> tuple[SendBucket, CommState]:
    """Return how `section.compression` sends a bucket, and what that keeps between steps."""
    match section.compression:
        case "off":
            return _send_uncompressed, NoCommState()
        case "bf16":
            return _send_bf16, NoCommState()
        case "fp16":
            return _send_fp16, NoCommState()
        case "powersgd":
            power = PowerSGD(rank=1 if section.powersgd_rank == "auto" else section.powersgd_rank)
            return power.send, power


def _send_uncompressed(bucket: GradBucket) -> tuple[Future[Tensor], int]:
    """Send gradients as they are, with the bits that torch's own path gives gradients that start as None.

    It multiplies by 1 / world_size as it copies them into the bucket, and then adds up (`mark_variable_ready_dense` in
    torch/csrc/distributed/c10d/reducer.cpp); torch's `allreduce_hook` divides, which on three ranks has other bits.
    """
    gradients = bucket.buffer()
    gradients.mul_(1 / dist.get_world_size())
    sum_of_ranks = dist.all_reduce(gradients, async_op=True)
    assert sum_of_ranks is not None, "this rank is in the process group"
    return sum_of_ranks.get_future().then(lambda future: future.value()[0]), gradients.nbytes


def _send_bf16(bucket: GradBucket) -> tuple[Future[Tensor], int]:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    num_bytes = bucket.buffer().numel() * torch.bfloat16.itemsize
    return bf16_compress_hook(None, bucket), num_bytes  # type: ignore[arg-type]  # None: all ranks


def _send_fp16(bucket: GradBucket) -> tuple[Future[Tensor], int]:
    """Send float16. A gradient beyond 65,504 becomes infinite on all ranks, which the guard of the run finds."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    num_bytes = bucket.buffer().numel() * torch.float16.itemsize
    return fp16_compress_hook(None, bucket), num_bytes  # type: ignore[arg-type]  # None: all ranks


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
