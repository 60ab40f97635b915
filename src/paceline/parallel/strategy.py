"""What joins the replicas of a model. Nothing else in the program asks how many ranks there are.

Each strategy has its own file; this one says what they share, and chooses.
"""

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
    """Make one model out of the ranks' replicas, and numbers of the whole out of the ranks' shares."""

    def prepare(self, model: nn.Module) -> nn.Module:
        """Return the module to call in training; its replicas start equal. `model` may be changed in place.

        The optimizer is made, and weights are loaded, from `model` afterwards.
        """
        ...

    def warm_up_buckets(self, step: Callable[[], None]) -> None:
        """Call `step`, a forward and backward pass that leaves nothing behind, if the first one is unlike the others.

        Every rank must call it, after `prepare` and all other passes that are no steps, of which `comm_state` forgets
        what it kept, and before the first step of a process.
        """
        ...

    def on_comm_wait(self, switch_stage: SwitchStage, *, compiled: bool = False) -> None:
        """Call `turn("exposed_communication")` from now on where a step begins to wait for other ranks.

        That is in the final backward, when this rank's last gradient is there, and in front of the forward pass while
        rank 0's buffers come in, after which `turn("forward")` is called; where each rank trains alone, in `clip`,
        after which `turn("optimizer")` is. A pass before the first `accumulate` of those that follow teaches which
        gradient is the last. Call it once, after `prepare`; `compiled` says that torch compiles what `prepare`
        returned. Nothing is called where waiting is not apart from computing.
        """
        ...

    def accumulate(self, *, final: bool) -> contextlib.AbstractContextManager[None]:
        """Surround a micro-batch; gradients are averaged over the ranks in the final one of a step."""
        ...

    def clip(self, parameters: Sequence[Tensor], max_norm: float) -> Tensor:
        """Return the L2 norm of the whole gradient, and scale it in place to `max_norm` where it is longer.

        The norm is that before scaling, float32 [], the same on every rank, so that all can decide by it; an infinite
        `max_norm` only measures. Where each rank trains alone, it is the mean of their norms. Every rank must call it.
        """
        ...

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean of `value` over the ranks, on each of them."""
        ...

    def sum(self, value: Tensor) -> Tensor:
        """Return the sum of `value` over the ranks, on each of them."""
        ...

    def all_gather(self, value: Tensor) -> Tensor:
        """Return [world_size, *value.shape] on every rank, in which row r is rank r's `value`."""
        ...

    def evaluating(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Surround forward passes of `model` itself, of which each rank may run another number.

        Every rank has rank 0's buffers inside, such as the running statistics of batch norm, and none waits for
        another. Gradients must be off (`torch.no_grad` or `torch.inference_mode`, entered inside), and weights are
        not to be changed. Every rank must enter and leave.
        """
        ...

    def gather(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return whole, plain tensors; what is no shard is returned as this rank has it. Every rank must call it."""
        ...

    def shard_like(self, full: Tensor, like: Tensor) -> Tensor:
        """Return this rank's part of `full`, which is the same on all ranks, laid out over them as `like` is."""
        ...

    def comm_times(self) -> CommTimes | None:
        """Return what buckets of gradients took so far, or None where they are not timed. Waits for the device."""
        ...

    def comm_state(self) -> CommState:
        """Return what sending gradients keeps between steps."""
        ...


def build_strategy(
    section: Parallel,
    world: World,
    device: torch.device,
    now: Callable[[], float] | None = None,
    warmup_steps: int = 0,
) -> Strategy:
    """Return what joins the ranks of `world`; one rank is never joined to itself.

    With `now`, a clock in seconds, ddp times its buckets after the first `warmup_steps` steps. Raise `WorldError` where
    the strategy has no such ranks or devices. Sharding needs the process group.
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
            from paceline.parallel.fsdp import FSDP  # it takes most of a second to import

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
