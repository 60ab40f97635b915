"""Average a bucket of gradients over the ranks, as it is or in fewer bits. Only ddp does; fsdp has its own formats."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future

from paceline.recipe.schema.parallel import Parallel

Send = Callable[[GradBucket], tuple[Future[Tensor], int]]
"""Returns what will be the mean of a bucket's gradients over the ranks, and the bytes of it that this rank sends."""

POWERSGD_FIRST_STEP = 10
"""Steps sent whole before PowerSGD begins, in this process. Torch needs 2, and its default of 1,000 would leave most
of our runs uncompressed."""

_SMALL = 1e-12
_ZERO_LENGTH = 1e-20
"""Added to the length of a factor before it divides, so that one of length 0 stays 0; far below `_SMALL`."""


def build_send(section: Parallel) -> Send:
    """Return how `section.compression` sends a bucket."""
    match section.compression:
        case "off":
            return _whole
        case "bf16":
            return _bf16
        case "fp16":
            return _fp16
        case "powersgd":
            return _powersgd(rank=1 if section.powersgd_rank == "auto" else section.powersgd_rank)


def _whole(bucket: GradBucket) -> tuple[Future[Tensor], int]:
    """Send gradients as they are, with the bits that torch's own path gives gradients that start as None.

    It multiplies by 1 / world_size as it copies them into the bucket, and then adds up (`mark_variable_ready_dense` in
    torch/csrc/distributed/c10d/reducer.cpp); torch's `allreduce_hook` divides, which on three ranks has other bits.
    """
    gradients = bucket.buffer()
    gradients.mul_(1 / dist.get_world_size())
    sum_of_ranks = dist.all_reduce(gradients, async_op=True)
    assert sum_of_ranks is not None, "this rank is in the process group"
    return sum_of_ranks.get_future().then(lambda future: future.value()[0]), gradients.nbytes


def _bf16(bucket: GradBucket) -> tuple[Future[Tensor], int]:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    num_bytes = bucket.buffer().numel() * torch.bfloat16.itemsize
    return bf16_compress_hook(None, bucket), num_bytes  # type: ignore[arg-type]  # None: all ranks


def _fp16(bucket: GradBucket) -> tuple[Future[Tensor], int]:
    """Send float16. A gradient beyond 65,504 becomes infinite on all ranks, which the guard of the run finds."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    num_bytes = bucket.buffer().numel() * torch.float16.itemsize
    return fp16_compress_hook(None, bucket), num_bytes  # type: ignore[arg-type]  # None: all ranks


def _powersgd(rank: int) -> Send:
    """Send factors of `rank` with error feedback and warm start (Vogels et al. 2019, arXiv 1905.13727).

    What compression has held back is not in a checkpoint: a resumed run begins again with whole gradients.
    """
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    state = PowerSGDState(
        None,
        matrix_approximation_rank=rank,
        start_powerSGD_iter=POWERSGD_FIRST_STEP,
        orthogonalization_epsilon=_ZERO_LENGTH,
    )
    noise: dict[int, Tensor] = {}

    def send(bucket: GradBucket) -> tuple[Future[Tensor], int]:
        number = bucket.index()
        if number in state.q_memory_dict:
            right = state.q_memory_dict[number]
            if number not in noise:
                noise[number] = _noise_like(right)
            _finite(state.error_dict[number])
            _finite(right).add_(noise[number])
        gradients, sent_before = bucket.buffer(), state.total_numel_after_compression
        future = powerSGD_hook(state, bucket)
        if gradients.device.type == "cpu":
            # Torch sends the second factor when the first has come, from a thread of gloo: those of two buckets could
            # go out in another order on another rank. NCCL's order is that of the host, which does not wait.
            future.wait()
        # Before the first compressed step torch counts nothing, and sends all.
        num_sent = state.total_numel_after_compression - sent_before or gradients.numel()
        return future, num_sent * gradients.element_size()

    return send


def _finite(memory: Tensor) -> Tensor:
    """Forget in place what is no number: a gradient that overflowed once must not be held back for all later steps."""
    return memory.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def _noise_like(right: Tensor) -> Tensor:
    """Return numbers too small to matter beside any but 0, the same on every rank.

    The right factors of a step are the first guess of the next. Those of a layer whose gradient was 0, as behind a
    branch that starts at zero, are 0, and no power iteration would ever leave that.
    """
    noise = torch.randn(right.shape, generator=torch.Generator().manual_seed(0))
    return noise.mul_(_SMALL).to(right.device, right.dtype)
