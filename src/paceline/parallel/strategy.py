"""The `Strategy` interface, and the choice of one. No other code branches on the number of ranks."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from paceline.core.errors import WorldError
from paceline.core.world import World
from paceline.parallel.base import CommState
from paceline.parallel.comm_hooks import CommTimes, build_comm_hook
from paceline.parallel.ddp import DDP, SwitchStage
from paceline.parallel.single_device import DataParallel, SingleDevice
from paceline.recipe.schema.train import Parallel


class Strategy(Protocol):
    """Train one model on all ranks, and reduce values over them."""

    def prepare(self, model: nn.Module) -> nn.Module:
        """Return the module to call in training, with equal weights on all ranks. May change `model` in place.

        Create the optimizer from `model` afterwards.
        """
        ...

    def warm_up_buckets(self, step: Callable[[], None]) -> None:
        """Call `step`, a forward and backward pass without side effects, if the first passes of a process differ.

        Call it before the first step, after all other warm-up passes. Resets `comm_state`. Collective.
        """
        ...

    def on_comm_wait(self, switch_stage: SwitchStage, *, compiled: bool = False) -> None:
        """Call `switch_stage("exposed_communication")` from now on whenever a step starts to wait for other ranks.

        That is after this rank's last gradient of a step; while buffers are received, then `switch_stage("forward")`;
        and in `clip` if each rank trains alone, then `switch_stage("optimizer")`. Call it once, after `prepare`;
        `compiled` says whether torch compiles the returned module.
        """
        ...

    def accumulate(self, *, final: bool) -> contextlib.AbstractContextManager[None]:
        """Return the context of a micro-batch; the final one of a step sync_gradients gradients over the ranks."""
        ...

    def clip(self, parameters: Sequence[Tensor], max_norm: float) -> Tensor:
        """Clip the gradient in place to L2 norm `max_norm`; return its norm before, float32 [], the same on all ranks.

        An infinite `max_norm` only measures. If each rank trains alone, return the mean of their norms. Collective.
        """
        ...

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean of `value` over the ranks, on each of them."""
        ...

    def sum(self, value: Tensor) -> Tensor:
        """Return the sum of `value` over the ranks, on each of them."""
        ...

    def all_gather(self, value: Tensor) -> Tensor:
        """Return [world_size, *value.shape] on every rank, whose row r is the `value` of rank r."""
        ...

    def evaluating(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Return a context for forward passes of the unwrapped `model` without gradients.

        Their number may differ between ranks: inside, every rank has rank 0's buffers and none waits for another.
        Collective at both ends.
        """
        ...

    def gather(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return whole tensors; those that are not sharded are this rank's own. Collective."""
        ...

    def shard_like(self, full: Tensor, like: Tensor) -> Tensor:
        """Return this rank's shard of `full`, equal on all ranks, in the layout of `like`."""
        ...

    def comm_times(self) -> CommTimes | None:
        """Return the bucket times so far, or None if they are not measured. Synchronizes the device."""
        ...

    def comm_state(self) -> CommState:
        """Return the state that gradient compression keeps between steps."""
        ...


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
                device,
                bucket_mb=None if section.bucket_mb == "auto" else section.bucket_mb,
                bucket_view=section.bucket_view,
                static_graph=section.static_graph,
                sync_gradients=section.sync_gradients,
                comm_hook=build_comm_hook(section, device, now, warmup_steps),
            )
        case "fsdp":
            from paceline.parallel.fsdp import FSDP  # importing it takes most of a second

            return FSDP(device, reshard=section.reshard)


def _data_parallel(world: World, device: torch.device) -> Strategy:
    fix = "set parallel.strategy=ddp, which works on several ranks and on CPUs"
    if world.world_size > 1:
        what = f"needs all GPUs in one process, and this run has {world.world_size} ranks"
    elif device.type != "cuda":
        what = "needs GPUs in one process, and this run is on a CPU"
    else:
        return DataParallel()
    raise WorldError(f"parallel.strategy: dataparallel {what} ({fix})")
