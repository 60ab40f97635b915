"""Choose the strategy of a run. No other code branches on the number of ranks."""

from collections.abc import Callable

import torch

from paceline.core.errors import WorldError
from paceline.core.world import World
from paceline.parallel.comm_hooks import build_comm_hook
from paceline.parallel.ddp import DDP
from paceline.parallel.strategy import DataParallel, SingleDevice, Strategy
from paceline.recipe.schema.train import Parallel


def build_strategy(
    section: Parallel,
    world: World,
    device: torch.device,
    now: Callable[[], float] | None = None,
    warmup_steps: int = 0,
) -> Strategy:
    """Return the strategy for the ranks of `world`, whose process group exists.

    With `now`, a clock in seconds, ddp times its buckets after `warmup_steps` steps. Raise `WorldError` if the strategy
    does not fit the ranks or devices.
    """
    match section.strategy:
        case "dataparallel":
            return _data_parallel(world, device)
        case _ if world.world_size == 1:
            return SingleDevice()
        case "ddp":
            return DDP(
                world.world_size,
                device,
                bucket_mb=None if section.bucket_mb == "auto" else section.bucket_mb,
                bucket_view=section.bucket_view,
                static_graph=section.static_graph,
                sync_gradients=section.sync_gradients,
                comm_hook=build_comm_hook(section, device, now, warmup_steps),
            )
        case "fsdp":
            from paceline.parallel.fsdp import FSDP  # importing it takes most of a second

            return FSDP(world.world_size, device, reshard=section.reshard)


def _data_parallel(world: World, device: torch.device) -> Strategy:
    fix = "set parallel.strategy=ddp, which works on several ranks and on CPUs"
    if world.world_size > 1:
        what = f"needs all GPUs in one process, and this run has {world.world_size} ranks"
    elif device.type != "cuda":
        what = "needs GPUs in one process, and this run is on a CPU"
    else:
        return DataParallel()
    raise WorldError(f"parallel.strategy: dataparallel {what} ({fix})")
