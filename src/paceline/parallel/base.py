"""Code that strategies share: gradient clipping, collectives, device choice, state of communication hooks."""

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

_PIECE_BYTES = 64 << 20  # gather in pieces: a GPU may not hold the rows of all ranks


def gradient_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the L2 norm of all `gradients` together: [], at least float32."""
    # In 16 bits the norm would overflow (float16) or keep only two digits (bfloat16).
    if any(gradient.dtype.itemsize < 4 for gradient in gradients):
        # The norm of the norms is the norm of all gradients.
        gradients = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
    norm: Tensor = get_total_norm(gradients)
    return norm


def clip_to_norm(parameters: Sequence[Tensor], norm: Tensor, max_norm: float) -> Tensor:
    """Clip the gradients of `parameters`, whose norm is `norm`, in place; return `norm` as float32 [].

    The factor is max_norm / (norm + 1e-6), as in torch (Pascanu et al. 2013, arXiv 1211.5063).
    """
    # An infinite limit only measures: scaling by 1 would read and write every gradient.
    if math.isfinite(max_norm):
        clip_grads_with_norm_(parameters, max_norm, norm)
    return norm.float()


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


def gather_rows_on_rank_0(row: Tensor) -> Tensor | None:
    """Return the ranks' `row` [N] as [world_size, N] in rank 0's host memory; None on other ranks."""
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
    """Broadcast rank 0's buffers, such as BatchNorm running statistics."""
    for buffer in model.buffers():
        dist.broadcast(buffer.data, src=0)


class CommState(Protocol):
    """State that a communication hook keeps between steps, per rank."""

    @property
    def has_state(self) -> bool:
        """Whether the hook keeps any state."""
        ...

    def reset(self) -> None:
        """Discard what warm-up passes left in the state."""
        ...

    def num_bytes(self, model: nn.Module) -> int:
        """Return the approximate size of all ranks' tensors in bytes."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of all ranks on rank 0, and {} on the others. Collective."""
        ...

    def values(self, model: nn.Module) -> dict[str, Any]:
        """Return the rest of the state as JSON values; parameters are identified by their names in `model`."""
        ...

    def load(self, model: nn.Module, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
        """Restore the state after all warm-up passes; return a note if some was lost, else "".

        `values` is empty for a checkpoint without communication state.
        """
        ...


@final
class NoCommState:
    """No state; `lost` is the note that `load` returns."""

    has_state = False

    def __init__(self, lost: str = "") -> None:
        self._lost = lost

    def reset(self) -> None:
        """Do nothing."""

    def num_bytes(self, model: nn.Module) -> int:
        """Return 0."""
        return 0

    def tensors(self) -> dict[str, Tensor]:
        """Return {}."""
        return {}

    def values(self, model: nn.Module) -> dict[str, Any]:
        """Return {}."""
        return {}

    def load(self, model: nn.Module, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
        """Discard state of several ranks, with a note."""
        if values:
            return f"resumed without PowerSGD's residuals of {values['ranks']} ranks: a single rank sends no gradients"
        return self._lost


def choose_device(section: Parallel, world: World) -> torch.device:
    """Return the device of this rank alone. Raise `WorldError` if the node has fewer GPUs than ranks."""
    available = torch.cuda.device_count() if section.device != "cpu" else 0
    if section.device == "cpu" or (section.device == "auto" and not available):
        if section.backend == "nccl":
            raise WorldError("parallel.backend: nccl needs GPUs, and this run is on CPUs (use parallel.backend=gloo)")
        return torch.device("cpu")
    # srun --gpus-per-task=1 shows each rank only its own GPU, as device 0.
    is_own = has_own_gpu(world, available)
    if world.local_world_size > available and not is_own:
        ranks, gpus = count(world.local_world_size, "rank"), count(available, "GPU")
        fix = f"start {available}, or set parallel.device=cpu" if available else "set parallel.device=cpu"
        raise WorldError(f"parallel.device: {section.device}: {ranks} on a node with {gpus} ({fix})")
    device = torch.device("cuda", 0 if is_own else world.local_rank)
    torch.cuda.set_device(device)  # NCCL and `torch.cuda` calls without a device would use GPU 0 on every rank
    return device


def generators(device: torch.device) -> tuple[torch.Generator, ...]:
    """Return torch's default generators: the CPU's, and on a GPU also the device's."""
    if device.type == "cuda":
        return torch.default_generator, torch.cuda.default_generators[device.index]
    return (torch.default_generator,)


def set_threads(section: Parallel, world: World) -> int:
    """Set and return this rank's number of CPU threads: `section.threads`, or its share of the node's cores."""
    threads = rank_cores(world) if section.threads == "auto" else section.threads
    torch.set_num_threads(threads)
    return threads
