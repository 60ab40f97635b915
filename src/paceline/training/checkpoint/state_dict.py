"""Convert live models and optimizers to the named, whole tensors of a checkpoint, and back.

Parameter names are those of the unwrapped model.
"""

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from paceline.core.errors import CheckpointError
from paceline.training.checkpoint.format import MODEL, load_tensor_group, tensor_bytes, verify_checkpoint

ShardLike = Callable[[Tensor, Tensor], Tensor]
"""`Strategy.shard_like`: this rank's shard of a whole tensor, in the layout of another tensor."""

ConvertTensors = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]


def _keep_whole(full: Tensor, like: Tensor) -> Tensor:
    return full


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name: live tensors, which `Strategy.gather` makes whole if they are sharded."""
    return dict(model.state_dict())


def load_model(
    path: Path, model: nn.Module, *, shard_like: ShardLike = _keep_whole, convert: ConvertTensors = dict
) -> None:
    """Load checkpoint `path`, its tensors converted, into `model`.

    Raise `CheckpointError` if it is damaged or does not fit.
    """
    verify_checkpoint(path)
    try:
        load_model_tensors(convert(load_tensor_group(path, MODEL)), model, shard_like=shard_like)
    except RuntimeError as error:
        first = " ".join(str(error).split())[:150]
        raise CheckpointError(f"{path}: does not fit the model: {first} (use the run's own recipe)") from None


def load_model_tensors(tensors: Mapping[str, Tensor], model: nn.Module, *, shard_like: ShardLike = _keep_whole) -> None:
    """Copy whole `tensors` into `model` by name. Raise `RuntimeError` if they do not fit."""
    current = model.state_dict()
    model.load_state_dict({name: shard_like(tensor, current.get(name, tensor)) for name, tensor in tensors.items()})


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimizer's state as `NUMBER.KEY`, with parameters numbered in group order.

    They are live tensors, which `Strategy.gather` makes whole. For other state of plugins see `optim.extra_state`.
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
    optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], *, shard_like: ShardLike = _keep_whole
) -> None:
    """Load whole tensors of `optimizer_tensors`; learning rates and other options are not changed."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        number_, _, key = name.partition(".")
        number = int(number_)
        state.setdefault(number, {})[key] = _match_layout(parameters[number], tensor, shard_like)
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    for number, values in state.items():
        # Torch has cast them to the parameter's dtype, which may be narrower, but placed scalars on the right device.
        target, shape = optimizer.state[parameters[number]], parameters[number].shape
        for key, value in values.items():
            if value.ndim and value.shape == shape:
                target[key] = value
            elif target[key].dtype != value.dtype:
                target[key] = value.to(target[key].device)


def weights_sha256(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of names, dtypes, shapes and bytes of whole `tensors`, sorted by name."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor_bytes(tensor))
    return digest.hexdigest()


def _match_layout(parameter: Tensor, value: Tensor, shard_like: ShardLike) -> Tensor:
    """Return `value` in the layout of its parameter; fused updates are slow if the layouts differ."""
    if not value.ndim or value.shape != parameter.shape:
        return value
    return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(shard_like(value, parameter))
