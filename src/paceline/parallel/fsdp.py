"""FSDP2: weights, gradients and optimizer state in one shard per rank, gathered layer by layer."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from paceline.parallel.collectives import broadcast_buffers, sum_over_ranks
from paceline.parallel.strategy import Strategy, clip_to_norm, gradient_norm

# A sharding unit has between 1 % and half of all parameters. Smaller modules stay with the root, since such small
# messages cost more than the memory they save; containers and larger modules are split.
_SMALLEST_SHARE = 0.01
_LARGEST_SHARE = 0.5


class FSDP(Strategy):
    """FSDP2 (Zhao et al. 2023, arXiv 2304.11277). `reshard` frees gathered weights after forward, as ZeRO-3 does."""

    def __init__(self, world_size: int, device: torch.device, *, reshard: bool) -> None:
        self.world_size = world_size
        self._device = device
        self._reshard = reshard
        self._mesh = init_device_mesh(device.type, (self.world_size,))
        self._units: list[FSDPModule] = []
        self._root: FSDPModule | None = None

    def prepare(self, model: nn.Module) -> nn.Module:
        """Shard the model in place from rank 0's values and return it; its parameters become DTensors."""
        # FSDP2 shards only contiguous parameters; images may be channels_last all the same.
        model.to(memory_format=torch.contiguous_format)
        for parameter in model.parameters():
            dist.broadcast(parameter.data, src=0)
        broadcast_buffers(model)
        chosen = sharding_units(model)
        self._units = [fully_shard(each, mesh=self._mesh, reshard_after_forward=self._reshard) for each in chosen]
        # Backward starts with the root's own parameters: freeing them after forward would gain nothing.
        self._root = fully_shard(model, mesh=self._mesh, reshard_after_forward=False)
        return model

    def unfreeze(self, model: nn.Module, set_trained: Callable[[], None]) -> nn.Module:
        """Call `set_trained` on the shards and on the gathered parameters, of which gradients are computed."""
        assert self._root is not None, "prepare comes first"
        set_trained()
        for module in [*self._units, self._root]:
            module.unshard()
        set_trained()
        for module in [*self._units, self._root]:
            module.reshard()
        return model

    @contextlib.contextmanager
    def accumulate(self, *, final: bool) -> Iterator[None]:
        """Accumulate unsharded gradients, and without `reshard` keep the weights, until the final micro-batch."""
        assert self._root is not None, "prepare comes first"
        self._root.set_requires_gradient_sync(final)
        self._root.set_reshard_after_backward(final or self._reshard)
        yield

    def clip(self, parameters: Sequence[Tensor], max_norm: float) -> Tensor:
        """Clip the averaged gradient; return its norm before, over all shards."""
        norm = gradient_norm([_local_shard(each.grad) for each in parameters if each.grad is not None])
        return clip_to_norm(parameters, sum_over_ranks(norm.square()).sqrt(), max_norm)

    @contextlib.contextmanager
    def evaluating(self, model: nn.Module) -> Iterator[None]:
        """Broadcast rank 0's buffers, and keep all weights gathered."""
        assert self._root is not None, "prepare comes first"
        # Ranks may run different numbers of forward passes, in which an all-gather would hang.
        broadcast_buffers(model)
        modules = [*self._units, self._root]
        for module in modules:
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()
        try:
            yield
        finally:
            for module in modules:
                module.reshard()
            for unit in self._units:
                unit.set_reshard_after_forward(self._reshard, recurse=False)

    def gather(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return whole tensors; those that were sharded are on the CPU."""
        # One at a time to the CPU: the GPU may not hold all of them.
        return {
            name: tensor.full_tensor().cpu() if isinstance(tensor, DTensor) else tensor
            for name, tensor in tensors.items()
        }

    def shard_like(self, full: Tensor, like: Tensor) -> Tensor:
        """Return this rank's shard of `full` as a DTensor like `like`; `full` if that is not a DTensor."""
        if not isinstance(like, DTensor):
            return full
        # `src_data_rank=None`: every rank has `full`, so nothing is sent.
        return distribute_tensor(full.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def sharding_units(model: nn.Module) -> list[nn.Module]:
    """Return the modules to gather one at a time, in order, such as a model's blocks."""
    total = _num_parameters(model)
    units: list[nn.Module] = []
    for child in model.children():
        units += _units_below(child, total)
    return units


def _units_below(module: nn.Module, total: int) -> list[nn.Module]:
    share = _num_parameters(module) / max(1, total)
    if share < _SMALLEST_SHARE or isinstance(module, nn.ParameterList | nn.ParameterDict):
        return []
    children = [child for child in module.children() if _num_parameters(child)]
    is_container = isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict)
    if children and (is_container or share > _LARGEST_SHARE):
        return [unit for child in children for unit in _units_below(child, total)]
    return [module]


def _local_shard(gradient: Tensor) -> Tensor:
    assert isinstance(gradient, DTensor), "the parameters are those of the sharded model"
    return gradient.to_local()


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
