"""Choose the device and the threads of a rank."""

import torch

from paceline.core.errors import WorldError
from paceline.core.limits import rank_cores
from paceline.core.units import count
from paceline.core.world import World
from paceline.parallel.own_gpu import has_own_gpu
from paceline.recipe.schema.parallel import Parallel


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
