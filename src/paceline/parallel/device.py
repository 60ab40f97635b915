"""This rank's device, random generators and CPU threads."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from paceline.core.errors import WorldError
from paceline.core.host import rank_cores
from paceline.core.units import count
from paceline.core.world import World
from paceline.parallel.environ import has_own_gpu
from paceline.recipe.schema.train import Parallel


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


def create_thread_pool(num: int, name: str) -> ThreadPoolExecutor:
    """Return `num` threads, each of which computes on one core, whatever torch uses elsewhere."""
    # Otherwise an operation in such a thread starts more OpenMP threads, which stay. With more of them than cores,
    # those of the main thread sleep after each operation rather than spin: a small model trains three times slower.
    num_threads, started = torch.get_num_threads(), threading.Barrier(num + 1)

    def start() -> None:
        torch.get_num_threads()  # initializes this thread: otherwise its first computation would reset the value below
        torch.set_num_threads(1)
        started.wait()

    pool = ThreadPoolExecutor(num, thread_name_prefix=name)
    for _ in range(num):
        pool.submit(start)
    started.wait()
    torch.set_num_threads(num_threads)  # a new thread inherits the value that any thread has set last
    return pool
