"""What the strategies share: gradient clipping, collectives over the default process group, devices, and hook state."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from paceline.core.errors import WorldError
from paceline.core.host import rank_cores
from paceline.core.units import count
from paceline.core.world import World
from paceline.parallel.environ import has_own_gpu
from paceline.recipe.schema.train import Parallel


def gradient_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the L2 norm of all `gradients` as one vector, [], in their dtype and in float32 at least.

    A norm in 16 bits would overflow in float16 and have two digits in bfloat16.
    """
    if any(gradient.dtype.itemsize < 4 for gradient in gradients):
        norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
        gradients = norms  # of which the norm is the same
    norm: Tensor = get_total_norm(gradients)
    return norm


def clip_to_norm(parameters: Sequence[Tensor], norm: Tensor, max_norm: float) -> Tensor:
    """Scale the gradients of `parameters`, whose norm is `norm`, to `max_norm` if they are longer; return float32 [].

    The factor is max_norm / (norm + 1e-6), as in torch (Pascanu et al. 2013, arXiv 1211.5063).
    """
    if math.isfinite(max_norm):
        clip_grads_with_norm_(parameters, max_norm, norm)
    return norm.float()


_PIECE_BYTES = 64 << 20


def sum_over_ranks(value: Tensor) -> Tensor:
    """Return the sum of `value` over the ranks; `value` itself is left alone."""
    total = value.clone()
    dist.all_reduce(total)
    return total


def mean_over_ranks(value: Tensor) -> Tensor:
    """Return the mean of `value` over the ranks."""
    return sum_over_ranks(value) / dist.get_world_size()


def all_gather_rows(value: Tensor) -> Tensor:
    """Return [world_size, *value.shape]: row r is rank r's `value`, which has the same shape on all."""
    rows = [torch.empty_like(value, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, value.contiguous())
    return torch.stack(rows)


def gather_rows_on_rank_0(row: Tensor) -> Tensor | None:
    """Return [world_size, N] in the memory of rank 0's host, in which row r is rank r's `row` [N]; None on the others.

    It comes in pieces, as a GPU may not hold all of it.
    """
    world_size, is_main = dist.get_world_size(), dist.get_rank() == 0
    rows = torch.empty(world_size, len(row), dtype=row.dtype) if is_main else None
    length = max(1, _PIECE_BYTES // (world_size * row.element_size()))
    for start in range(0, len(row), length):
        piece = row[start : start + length]
        pieces = [torch.empty_like(piece) for _ in range(world_size)] if is_main else None
        dist.gather(piece, pieces)
        if rows is not None and pieces is not None:
            rows[:, start : start + length].copy_(torch.stack(pieces))
    return rows


def broadcast_buffers(model: nn.Module) -> None:
    """Give every rank rank 0's buffers, such as the running statistics of batch norm."""
    for buffer in model.buffers():
        dist.broadcast(buffer.data, src=0)


class CommState(Protocol):
    """What a way to send gradients keeps between steps, each rank its own."""

    @property
    def has_state(self) -> bool:
        """Whether there is such a thing."""
        ...

    def reset(self) -> None:
        """Begin anew, after passes that were no steps."""
        ...

    def num_bytes(self, model: nn.Module) -> int:
        """Return how large the tensors of all ranks will be, in bytes, but for a small part."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """Return what all ranks keep, on rank 0, and nothing on the others. Every rank must call it."""
        ...

    def values(self, model: nn.Module) -> dict[str, Any]:
        """Return the rest as values for JSON, nothing where there is none; parameters by their names in `model`."""
        ...

    def load(self, model: nn.Module, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
        """Take over what both returned, after all passes that are no steps; return a note of what is lost, if any is.

        `values` are empty where a checkpoint has none.
        """
        ...


@final
class NoCommState:
    """For what keeps nothing. `lost` is the note of a resumed run that lacks something all the same."""

    has_state = False

    def __init__(self, lost: str = "") -> None:
        self._lost = lost

    def reset(self) -> None:
        """Do nothing."""

    def num_bytes(self, model: nn.Module) -> int:
        """Return 0."""
        return 0

    def tensors(self) -> dict[str, Tensor]:
        """Return nothing."""
        return {}

    def values(self, model: nn.Module) -> dict[str, Any]:
        """Return nothing."""
        return {}

    def load(self, model: nn.Module, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
        """Leave what several ranks kept, and say so."""
        if values:
            return f"resumed without what PowerSGD had held back on {values['ranks']} ranks: one rank sends nothing"
        return self._lost


def choose_device(section: Parallel, world: World) -> torch.device:
    """Return this rank's device, one a rank. Raise `WorldError` when the node has fewer GPUs than ranks.

    Where Slurm has given a GPU to each rank, and shows it no other (srun --gpus-per-task=1), that is its own.
    """
    available = torch.cuda.device_count() if section.device != "cpu" else 0
    if section.device == "cpu" or (section.device == "auto" and not available):
        if section.backend == "nccl":
            raise WorldError("parallel.backend: nccl needs GPUs, and this run is on CPUs (use parallel.backend=gloo)")
        return torch.device("cpu")
    is_own = has_own_gpu(world, available)
    if world.local_world_size > available and not is_own:
        ranks, gpus = count(world.local_world_size, "rank"), count(available, "GPU")
        fix = f"start {available}, or set parallel.device=cpu" if available else "set parallel.device=cpu"
        raise WorldError(f"parallel.device: {section.device}: {ranks} on a node with {gpus} ({fix})")
    device = torch.device("cuda", 0 if is_own else world.local_rank)
    torch.cuda.set_device(device)
    return device


def generators(device: torch.device) -> tuple[torch.Generator, ...]:
    """Return the generators that torch draws from on this rank: the CPU's, and the GPU's where there is one."""
    if device.type == "cuda":
        return torch.default_generator, torch.cuda.default_generators[device.index]
    return (torch.default_generator,)


def set_threads(section: Parallel, world: World) -> int:
    """Set and return the CPU threads a rank computes with: its share of the node's cores, unless told."""
    threads = rank_cores(world) if section.threads == "auto" else section.threads
    torch.set_num_threads(threads)
    return threads
