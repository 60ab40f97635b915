"""What joins the replicas of a model. Nothing else in the program asks how many ranks there are."""

import contextlib
from collections.abc import Iterator
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from paceline.core.world import World


class Strategy(Protocol):
    """Make one model out of the ranks' replicas, and numbers of the whole out of the ranks' shares."""

    def prepare(self, model: nn.Module) -> nn.Module:
        """Return the module to call in training; its replicas start equal."""
        ...

    def accumulate(self, *, final: bool) -> contextlib.AbstractContextManager[None]:
        """Surround a micro-batch; gradients are averaged over the ranks in the final one of a step."""
        ...

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean of `value` over the ranks, on each of them."""
        ...

    def sum(self, value: Tensor) -> Tensor:
        """Return the sum of `value` over the ranks, on each of them."""
        ...

    def align(self, model: nn.Module) -> None:
        """Give every rank rank 0's buffers, such as the running statistics of batch norm."""
        ...


class SingleDevice:
    """One rank: nothing to join."""

    def prepare(self, model: nn.Module) -> nn.Module:
        """Return the model itself."""
        return model

    def accumulate(self, *, final: bool) -> contextlib.AbstractContextManager[None]:
        """Return a context that does nothing."""
        return contextlib.nullcontext()

    def mean(self, value: Tensor) -> Tensor:
        """Return `value`."""
        return value

    def sum(self, value: Tensor) -> Tensor:
        """Return `value`."""
        return value

    def align(self, model: nn.Module) -> None:
        """Do nothing: the only rank is rank 0."""


class DDP:
    """Replicas that average their gradients while backward runs (Li et al. 2020, arXiv 2006.15704).

    Before each forward the buffers of rank 0 go to all ranks, so that a resumed run starts from what an
    uninterrupted one would have used.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: DistributedDataParallel | None = None

    def prepare(self, model: nn.Module) -> nn.Module:
        """Return the model wrapped, with rank 0's parameters and buffers on every rank."""
        device_ids = [self._device.index] if self._device.type == "cuda" else None
        self._module = DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True)
        return self._module

    def accumulate(self, *, final: bool) -> contextlib.AbstractContextManager[None]:
        """Return a context without communication for all but the final micro-batch."""
        assert self._module is not None, "prepare comes first"
        return contextlib.nullcontext() if final else self._module.no_sync()

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean over the ranks."""
        return self.sum(value) / dist.get_world_size()

    def sum(self, value: Tensor) -> Tensor:
        """Return the sum over the ranks; `value` itself is left alone."""
        total = value.clone()
        dist.all_reduce(total)
        return total

    def align(self, model: nn.Module) -> None:
        """Broadcast rank 0's buffers."""
        for buffer in self._buffers(model):
            dist.broadcast(buffer, src=0)

    @staticmethod
    def _buffers(model: nn.Module) -> Iterator[Tensor]:
        return (buffer.data for buffer in model.buffers())


def build_strategy(world: World, device: torch.device) -> Strategy:
    """Return what joins the ranks of `world`."""
    return DDP(device) if world.world_size > 1 else SingleDevice()
