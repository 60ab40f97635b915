"""Between live models and optimizers and the named, whole tensors of a checkpoint.

Names of parameters are the model's own: it is the bare model that is saved, not what wraps it for several ranks.
"""

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from paceline.core.errors import CheckpointError
from paceline.train.checkpoint.format import MODEL, load_part, verify
from paceline.train.checkpoint.tensorfile import tensor_bytes

ShardLike = Callable[[Tensor, Tensor], Tensor]
"""`Strategy.shard_like`: this rank's part of a whole tensor, laid out as another tensor is."""


def _whole(full: Tensor, like: Tensor) -> Tensor:
    return full


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by the model's own names.

    They are the live tensors, and shards where the model is sharded: `Strategy.gather` makes them whole.
    """
    return dict(model.state_dict())


def load_model(path: Path, model: nn.Module, *, shard_like: ShardLike = _whole) -> None:
    """Load the weights and buffers of checkpoint `path` into `model`. Raise `CheckpointError` for damage."""
    verify(path)
    try:
        load_model_tensors(load_part(path, MODEL), model, shard_like=shard_like)
    except RuntimeError as error:
        first = " ".join(str(error).split())[:150]
        raise CheckpointError(f"{path}: does not fit the model: {first} (use the run's own recipe)") from None


def load_model_tensors(tensors: Mapping[str, Tensor], model: nn.Module, *, shard_like: ShardLike = _whole) -> None:
    """Copy whole `tensors` into `model` by the model's own names. Raise `RuntimeError` where they do not fit."""
    own = model.state_dict()
    model.load_state_dict({name: shard_like(tensor, own.get(name, tensor)) for name, tensor in tensors.items()})


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimizer's state as `NUMBER.KEY`; parameters are numbered in the order of the optimizer's groups.

    They are the live tensors, and shards where the parameters are: `Strategy.gather` makes them whole. What a user's
    own optimizer keeps beside them is for `optimizers.counters`.
    """
    state = optimizer.state_dict()["state"]
    return {
        f"{number}.{key}": value
        for number, values in state.items()
        if isinstance(number, int)
        for key, value in values.items()
        if isinstance(value, Tensor)
    }


def load_optimizer(
    optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], *, shard_like: ShardLike = _whole
) -> None:
    """Load what `optimizer_tensors` returned, made whole, into an optimizer of the same parameters.

    State of a parameter's shape is laid out as the parameter is. Learning rates and other options stay as they are.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        number_, _, key = name.partition(".")
        number = int(number_)
        state.setdefault(number, {})[key] = _like(parameters[number], tensor, shard_like)
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    for number, values in state.items():
        # Torch has cast them to the parameter's dtype, which may be narrower, and knows where to keep single numbers.
        own, shape = optimizer.state[parameters[number]], parameters[number].shape
        for key, value in values.items():
            if value.ndim and value.shape == shape:
                own[key] = value
            elif own[key].dtype != value.dtype:
                own[key] = value.to(own[key].device)


def weights_sha256(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of names, types, shapes and bytes of whole `tensors`, sorted by name (see `model_tensors`)."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor_bytes(tensor))
    return digest.hexdigest()


def _like(parameter: Tensor, value: Tensor, shard_like: ShardLike) -> Tensor:
    """Return `value` in the layout of its parameter; fused updates are slow on a pair that differs."""
    if not value.ndim or value.shape != parameter.shape:
        return value
    return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(shard_like(value, parameter))
