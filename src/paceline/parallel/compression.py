"""Average a bucket of gradients over the ranks, as it is or in fewer bits. Only ddp does; fsdp has its own formats."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future

from paceline.parallel.memory import CommState, NoCommState
from paceline.parallel.powersgd import PowerSGD
from paceline.recipe.schema.parallel import Parallel

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
