"""The `Strategy` interface and its choice. No other code branches on the number of ranks."""

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
        """Return the module to call in training; its replicas start equal. `model` may be changed in place.

        Create the optimizer and load weights from `model` afterwards.
        """
        ...

    def warm_up_buckets(self, step: Callable[[], None]) -> None:
        """Call `step`, a forward and backward pass without side effects, if the first pass of a process differs from
        others.

        Every rank must call it after `prepare` and all other warm-up passes, and before the first step. `comm_state` is
        reset.
        """
        ...

    def on_comm_wait(self, switch_stage: SwitchStage, *, compiled: bool = False) -> None:
        """Call `switch_stage("exposed_communication")` from now on whenever a step starts to wait for other ranks.

        In the final backward this is after the rank's last gradient; before forward it is while buffers are received,
        followed by `switch_stage("forward")`; if each rank trains alone it is in `clip`, followed by
        `switch_stage("optimizer")`. A backward pass before the first `accumulate` shows which gradient is last. Call it
        once, after `prepare`; `compiled` says whether torch compiles the returned module.
        """
        ...

    def accumulate(self, *, final: bool) -> contextlib.AbstractContextManager[None]:
        """Surround a micro-batch; gradients are averaged over the ranks in the final one of a step."""
        ...

    def clip(self, parameters: Sequence[Tensor], max_norm: float) -> Tensor:
        """Scale the whole gradient in place to at most `max_norm`; return its L2 norm before, float32 [], the same on
        every rank.

        An infinite `max_norm` only measures. If each rank trains alone, the mean of their norms is returned. Every rank
        must call it.
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
        """Surround forward passes of the unwrapped `model`, whose number may differ between ranks.

        Inside, every rank has rank 0's buffers, and none waits for another. Disable gradients inside, and do not change
        weights. Every rank must enter and exit.
        """
        ...

    def gather(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return whole tensors; those that are not sharded are this rank's own. Every rank must call it."""
        ...

    def shard_like(self, full: Tensor, like: Tensor) -> Tensor:
        """Return this rank's shard of `full`, which is equal on all ranks, sharded as `like` is."""
        ...

    def comm_times(self) -> CommTimes | None:
        """Return the bucket times so far, or None if they are not measured. Synchronizes the device."""
        ...

    def comm_state(self) -> CommState:
        """Return the state that sending gradients keeps between steps."""
        ...


def build_strategy(
    section: Parallel,
    world: World,
    device: torch.device,
    now: Callable[[], float] | None = None,
    warmup_steps: int = 0,
) -> Strategy:
    """Return the strategy for the ranks of `world`; a single rank needs none but dataparallel.

    With `now`, a clock in seconds, ddp times its buckets after `warmup_steps` steps. FSDP needs the process group.
    Raise `WorldError` if the strategy does not fit the ranks or devices.
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
                averages=section.sync_gradients,
                wiring=build_comm_hook(section, device, now, warmup_steps),
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
