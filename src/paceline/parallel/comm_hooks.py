"""DDP communication hooks: time each gradient bucket, and send it uncompressed, in 16 bits or as PowerSGD factors.

Without timing and compression no hook is registered, and torch's own path runs unchanged.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from paceline.core.results import BucketResult
from paceline.parallel.collectives import gather_rows_on_rank_0
from paceline.recipe.schema.train import Parallel

SendBucket = Callable[[GradBucket], tuple[Future[Tensor], int]]
"""Starts the all-reduce of a bucket; returns the future mean over the ranks, and the bytes that this rank sends."""
POWERSGD_FIRST_STEP: Final = 10
"""Uncompressed steps before PowerSGD starts; torch needs at least 2. Its default, 1,000, is longer than many runs."""
_NOISE_SCALE: Final = 1e-12
# Added to the length of a factor before dividing, so that a factor of length 0 stays 0; far below `_NOISE_SCALE`.
_ORTHOGONALIZATION_EPS: Final = 1e-20


@dataclass(frozen=True)
class CommTimes:
    """Mean communication times over `n` steps; `buckets` in the order in which they are sent.

    `wire_s`: seconds from the first bucket ready to the last one averaged, including waiting for stragglers.
    """

    wire_s: float
    buckets: tuple[BucketResult, ...]
    n: int


class CommHook:
    """Send the gradients of a DDP replica by `send`, untimed.

    `powersgd` is the compression behind `send` if it keeps state between steps.
    """

    def __init__(self, send: SendBucket, powersgd: "PowerSGD | None" = None) -> None:
        self.powersgd = powersgd
        self._send = send

    def attach(self, replica: DistributedDataParallel) -> None:
        """Register the hook, once, before the first step."""
        replica.register_comm_hook(None, self._hook)

    def times(self) -> CommTimes | None:
        """Return the times measured so far, or None. Synchronizes the device."""
        return None

    def reset(self) -> None:
        """Discard times and state of warm-up passes."""
        if self.powersgd:
            self.powersgd.reset()

    def _hook(self, state: object, bucket: GradBucket) -> Future[Tensor]:
        return self._send(bucket)[0]


@dataclass(frozen=True)
class HostEvent:
    """What `torch.cuda.Event` is on a GPU, of a CPU, which runs synchronously: the time `s` in seconds."""

    s: float

    def query(self) -> bool:
        """Return True."""
        return True

    def elapsed_time(self, end: "HostEvent") -> float:
        """Return the milliseconds until `end`."""
        return (end.s - self.s) * 1e3


def record_cuda_event() -> Any:
    """Return an event in the current stream."""
    # When a bucket is ready, the current stream is that of the gradients. When it is averaged, torch calls the callback
    # in a stream of its own, which waits for the collective.
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


@dataclass
class _SentBucket:
    """A bucket in flight; `ready` and `done` are events, `done` is None until it is averaged."""

    num_bytes: int
    ready: Any
    done: Any = None


@dataclass
class _BucketSums:
    """Sums over `n` steps in seconds; `ready_s` and `took_s` have one entry per bucket, `sizes` are their bytes."""

    sizes: tuple[int, ...] = ()
    ready_s: list[float] = field(default_factory=list)
    took_s: list[float] = field(default_factory=list)
    wire_s: float = 0.0
    n: int = 0


@final
class TimedCommHook(CommHook):
    """Send gradients by `send`, and time each bucket. Times are read as steps complete, without synchronizing."""

    def __init__(
        self, send: SendBucket, powersgd: "PowerSGD | None", mark: Callable[[], Any], warmup_steps: int = 0
    ) -> None:
        super().__init__(send, powersgd)
        self._mark = mark
        self._warmup_steps = self._warmup_left = warmup_steps
        self._current_step: list[_SentBucket] = []
        self._pending_steps: deque[list[_SentBucket]] = deque()
        self._sums = _BucketSums()

    def times(self) -> CommTimes | None:
        """Return the means so far, or None if no step has been counted."""
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
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

    def reset(self) -> None:
        """Reset the state of `send`, the warm-up and the sums."""
        super().reset()
        self._warmup_left = self._warmup_steps
        self._pending_steps.clear()
        self._sums = _BucketSums()

    def _hook(self, state: object, bucket: GradBucket) -> Future[Tensor]:
        if bucket.index() == 0:  # also drops a step whose backward raised
            self._current_step = []
        sent = _SentBucket(0, self._mark())
        self._current_step.append(sent)
        averaged, sent.num_bytes = self._send(bucket)
        if bucket.is_last():
            self._read()
            self._pending_steps.append(self._current_step)

        def mark_averaged(future: Future[Tensor]) -> Tensor:
            sent.done = self._mark()
            return future.value()

        # The callback may run in another thread, and on a GPU before the collective has finished: it only marks.
        return averaged.then(mark_averaged)

    def _read(self) -> None:
        """Add up the steps whose buckets have all been averaged."""
        while self._pending_steps and all(
            each.done is not None and each.ready.query() and each.done.query() for each in self._pending_steps[0]
        ):
            step = self._pending_steps.popleft()
            if self._warmup_left:
                self._warmup_left -= 1
            else:
                self._add(step)

    def _add(self, step: list[_SentBucket]) -> None:
        sizes = tuple(each.num_bytes for each in step)
        # Buckets change: torch regroups parameters after the first step, and PowerSGD starts to compress after ten.
        # Times before the last change are dropped.
        if sizes != self._sums.sizes:
            self._sums = _BucketSums(sizes, [0.0] * len(sizes), [0.0] * len(sizes))
        sums, first = self._sums, step[0].ready
        for number, each in enumerate(step):
            sums.ready_s[number] += _seconds(first, each.ready)
            sums.took_s[number] += _seconds(each.ready, each.done)
        sums.wire_s += max(_seconds(first, each.done) for each in step)
        sums.n += 1


def _seconds(start: Any, end: Any) -> float:
    return float(start.elapsed_time(end)) / 1e3


def build_comm_hook(
    section: Parallel, device: torch.device, now: Callable[[], float] | None, warmup_steps: int = 0
) -> CommHook | None:
    """Return the hook that sends gradients, or None for torch's own path.

    With a clock `now` (seconds), buckets are timed after `warmup_steps`.
    """
    if now is None and section.compression == "off":
        return None
    send, powersgd = build_send_bucket(section)
    if now is None:
        return CommHook(send, powersgd)
    mark = record_cuda_event if device.type == "cuda" else lambda: HostEvent(now())
    return TimedCommHook(send, powersgd, mark, warmup_steps)


def build_send_bucket(section: Parallel) -> tuple[SendBucket, "PowerSGD | None"]:
    """Return the function that sends buckets for `parallel.compression`, and the compression if it keeps state."""
    match section.compression:
        case "off":
            return _send_uncompressed, None
        case "bf16":
            return _send_bf16, None
        case "fp16":
            return _send_fp16, None
        case "powersgd":
            powersgd = PowerSGD(rank=1 if section.powersgd_rank == "auto" else section.powersgd_rank)
            return powersgd.send, powersgd


def _send_uncompressed(bucket: GradBucket) -> tuple[Future[Tensor], int]:
    """Send gradients bitwise as torch does without a hook."""
    gradients = bucket.buffer()
    # Torch multiplies by 1 / world_size as it copies gradients into the bucket, then sums (`mark_variable_ready_dense`
    # in torch/csrc/distributed/c10d/reducer.cpp). Torch's `allreduce_hook` divides, which gives other bits on three
    # ranks.
    gradients.mul_(1 / dist.get_world_size())
    sum_of_ranks = dist.all_reduce(gradients, async_op=True)
    assert sum_of_ranks is not None, "this rank is in the process group"
    return sum_of_ranks.get_future().then(lambda future: future.value()[0]), gradients.nbytes


def _send_bf16(bucket: GradBucket) -> tuple[Future[Tensor], int]:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    num_bytes = bucket.buffer().numel() * torch.bfloat16.itemsize
    return bf16_compress_hook(None, bucket), num_bytes  # type: ignore[arg-type]  # None: all ranks


def _send_fp16(bucket: GradBucket) -> tuple[Future[Tensor], int]:
    # A gradient beyond 65,504 becomes infinite on all ranks, which the non-finite check detects.
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    num_bytes = bucket.buffer().numel() * torch.float16.itemsize
    return fp16_compress_hook(None, bucket), num_bytes  # type: ignore[arg-type]  # None: all ranks


@final
class PowerSGD:
    """PowerSGD of `rank` with error feedback and warm start (Vogels et al. 2019, arXiv 1905.13727).

    The state is torch's: per bucket a residual, which differs between ranks, and the factors P and Q, which do not.
    """

    # Torch identifies a bucket by its number, a checkpoint by the names of its parameters. Torch's generator is not
    # saved: it is used once per bucket, in the first compressed step, and starts from the same seed in every process.
    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._buckets: list[list[Tensor]] = []
        self._noise: dict[int, Tensor] = {}
        self._state = self._new_state()

    def send(self, bucket: GradBucket) -> tuple[Future[Tensor], int]:
        """Send a bucket, as `SendBucket`."""
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook

        state, number = self._state, bucket.index()
        self._buckets[number:] = [bucket.parameters()]  # later entries are of the previous pass and may be stale
        if number in state.q_memory_dict:
            right = state.q_memory_dict[number]
            if number not in self._noise:
                self._noise[number] = _noise_like(right)
            _replace_nonfinite(state.error_dict[number])
            _replace_nonfinite(right).add_(self._noise[number])
        gradients, sent_before = bucket.buffer(), state.total_numel_after_compression
        future = powerSGD_hook(state, bucket)
        if gradients.device.type == "cpu":
            # Torch sends the second factor from a gloo thread once the first has arrived, so two buckets could be sent
            # in another order on another rank. NCCL keeps the order of the host, so no wait is needed there.
            future.wait()
        # Before the first compressed step torch sends everything and counts nothing.
        num_sent = state.total_numel_after_compression - sent_before or gradients.numel()
        return future, num_sent * gradients.element_size()

    def reset(self) -> None:
        """Start over with uncompressed steps; the buckets are the same."""
        self._noise.clear()
        self._state = self._new_state()

    def num_bytes(self, model: nn.Module) -> int:
        """Return the approximate size of all ranks' tensors in bytes: one gradient per rank."""
        return dist.get_world_size() * sum(each.nbytes for each in model.parameters() if each.requires_grad)

    def tensors(self) -> dict[str, Tensor]:
        """Return residuals `BUCKET.error` [world_size, N], and P and Q as `BUCKET.left` and `.right`.

        They are on rank 0, and the other ranks return {}. Collective.
        """
        rows = {number: gather_rows_on_rank_0(error) for number, error in sorted(self._state.error_dict.items())}
        by_name = {f"{number}.error": row for number, row in rows.items() if row is not None}
        if by_name:
            by_name |= {f"{number}.left": each for number, each in self._state.p_memory_dict.items()}
            by_name |= {f"{number}.right": each for number, each in self._state.q_memory_dict.items()}
        return by_name

    def values(self, model: nn.Module) -> dict[str, Any]:
        """Return world size, number of steps, and the parameter names of each bucket in `model`, as JSON values."""
        return {"ranks": dist.get_world_size(), "steps": self._state.iter, "buckets": self._names(model)}

    def load(self, model: nn.Module, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
        """Restore this rank's residuals and the factors after all warm-up passes; return a note if they do not fit.

        `values` is empty for a checkpoint without them.
        """
        reason = self._mismatch(model, values)
        if reason:
            again = f"it starts again with {POWERSGD_FIRST_STEP} uncompressed steps"
            return f"resumed without PowerSGD's residuals: {reason}; {again}"
        state, rank = self._state, dist.get_rank()
        state.iter = values["steps"]
        for number, bucket in enumerate(self._buckets if tensors else []):
            # Copy into memory that torch allocates: matrix libraries may rely on its alignment.
            residual, left, right = (
                each.to(bucket[0].device, copy=True)
                for each in (tensors[f"{number}.error"][rank], tensors[f"{number}.left"], tensors[f"{number}.right"])
            )
            state.error_dict[number], state.p_memory_dict[number], state.q_memory_dict[number] = residual, left, right
        return ""

    def _mismatch(self, model: nn.Module, values: Mapping[str, Any]) -> str:
        """Return why a checkpoint does not fit these ranks and buckets, or ""."""
        ranks = dist.get_world_size()
        if not values:
            return "the checkpoint has none"
        if values["ranks"] != ranks:
            return f"they are of {values['ranks']} ranks, and this run has {ranks}"
        return "" if values["buckets"] == self._names(model) else "gradients are grouped into other buckets"

    def _names(self, model: nn.Module) -> list[list[str]]:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        return [[names[id(each)] for each in bucket] for bucket in self._buckets]

    def _new_state(self) -> Any:
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

        return PowerSGDState(
            None,
            matrix_approximation_rank=self._rank,
            start_powerSGD_iter=POWERSGD_FIRST_STEP,
            orthogonalization_epsilon=_ORTHOGONALIZATION_EPS,
        )


def _replace_nonfinite(buffer: Tensor) -> Tensor:
    """Set NaN and infinite values to 0 in place."""
    # Error feedback would carry one overflow into every later step.
    return buffer.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def _noise_like(right: Tensor) -> Tensor:
    """Return noise that matters only next to 0, the same on every rank."""
    # Q of one step is the first guess of the next. If a layer's gradient was 0, such as behind a zero-initialized
    # branch, Q is 0, and power iteration would never leave 0.
    noise = torch.randn(right.shape, generator=torch.Generator().manual_seed(0))
    return noise.mul_(_NOISE_SCALE).to(right.device, right.dtype)
