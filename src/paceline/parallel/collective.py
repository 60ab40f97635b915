"""Numbers of the whole out of the ranks' shares, over the default process group."""

import torch
import torch.distributed as dist
from torch import Tensor, nn


def sum_over_ranks(value: Tensor) -> Tensor:
    """Return the sum of `value` over the ranks; `value` itself is left alone."""
    total = value.clone()
    dist.all_reduce(total)
    return total


def mean_over_ranks(value: Tensor) -> Tensor:
    """Return the mean of `value` over the ranks."""
    return sum_over_ranks(value) / dist.get_world_size()


def every_rank(value: Tensor) -> Tensor:
    """Return [world_size, *value.shape]: row r is rank r's `value`, which has the same shape on all."""
    rows = [torch.empty_like(value, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, value.contiguous())
    return torch.stack(rows)


def broadcast_buffers(model: nn.Module) -> None:
    """Give every rank rank 0's buffers, such as the running statistics of batch norm."""
    for buffer in model.buffers():
        dist.broadcast(buffer.data, src=0)
