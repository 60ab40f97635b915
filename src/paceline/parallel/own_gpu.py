"""Whether a batch system has given this rank a GPU of its own, and shows it no other. Torch-free."""

from paceline.core.world import World


def has_own_gpu(world: World, available: int) -> bool:
    """Return whether the one GPU that is `available` to this rank is its alone, as by `srun --gpus-per-task=1`.

    It is where Slurm has started each of the node's ranks as a task, and has given them as many GPUs or more.
    """
    return available == 1 and world.local_world_size <= min(world.given_gpus, world.local_tasks)
