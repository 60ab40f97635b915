"""Reduce and gather tensors over the ranks of the default process group."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

_PIECE_BYTES = 64 << 20  # gather in pieces: a GPU may not hold the rows of all ranks


def sum_over_ranks(value: Tensor) -> Tensor:
    """Return the sum of `value` over the ranks."""
    total = value.clone()  # `all_reduce` works in place
    dist.all_reduce(total)
    return total


def mean_over_ranks(value: Tensor) -> Tensor:
    """Return the mean of `value` over the ranks."""
    return sum_over_ranks(value) / dist.get_world_size()


def all_gather_rows(value: Tensor) -> Tensor:
    """Return [world_size, *value.shape] whose row r is the `value` of rank r; all ranks have the same shape."""
    # `all_gather` needs dense buffers, and `value` may be channels_last.
    rows = [torch.empty_like(value, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, value.contiguous())
    return torch.stack(rows)


def gather_rows_on_rank_0(row: Tensor, device: torch.device | None = None) -> Tensor | None:
    """Return the ranks' `row` [N] as [world_size, N] in rank 0's host memory; None on other ranks.

    `device` is that of the process group, if `row` is not on it.
    """
    world_size, is_main = dist.get_world_size(), dist.get_rank() == 0
    rows = torch.empty(world_size, len(row), dtype=row.dtype) if is_main else None
    length = max(1, _PIECE_BYTES // (world_size * row.element_size()))
    for start in range(0, len(row), length):
        piece = row[start : start + length].to(device)
        pieces = [torch.empty_like(piece) for _ in range(world_size)] if is_main else None
        dist.gather(piece, pieces)
        if rows is not None and pieces is not None:
            rows[:, start : start + length].copy_(torch.stack(pieces))
    return rows


def broadcast_buffers(model: nn.Module) -> None:
    """Broadcast rank 0's buffers, such as BatchNorm running statistics."""
    for buffer in model.buffers():
        dist.broadcast(buffer.data, src=0)
