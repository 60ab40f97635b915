"""Save and load the state of a run: safetensors for tensors, JSON for the rest, a digest of each file.

A checkpoint is a folder written beside its final name and moved into place whole, so a kill at any moment leaves
the previous one. Nothing is unpickled, so a checkpoint cannot run code. What is written is whole and plain: which
strategy wrote it, and on how many ranks, cannot be told from it. Names of parameters are the model's own, without
what wrappers put before them.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from paceline.core.errors import CheckpointError

FORMAT_VERSION = 2
MODEL, OPTIMIZER = "model", "optimizer"
_SUFFIX, _STATE, _MANIFEST = ".safetensors", "state.json", "manifest.json"
_ALWAYS = {MODEL + _SUFFIX, OPTIMIZER + _SUFFIX, _STATE}
_COMPILED = "_orig_mod"

ShardLike = Callable[[Tensor, Tensor], Tensor]
"""`Strategy.shard_like`: this rank's part of a whole tensor, laid out as another tensor is."""


def _whole(full: Tensor, like: Tensor) -> Tensor:
    return full


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint holds: whole tensors by part and name, and plain values for JSON.

    The parts `model` and `optimizer` are always there; others, such as `average`, where there is such a thing.
    """

    tensors: Mapping[str, Mapping[str, Tensor]]
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of a run: folders `step-00001234`, of which the `keep` newest and the best stay."""

    folder: Path
    keep: int

    def save(self, step: int, best_step: int, snapshot: Snapshot) -> Path:
        """Write the checkpoint of `step` and return its folder. Only rank 0 calls it."""
        assert {MODEL, OPTIMIZER} <= snapshot.tensors.keys(), "a checkpoint has a model and an optimizer"
        final = self._path(step)
        beside = self.folder / f".{final.name}.tmp"
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        for name, tensors in snapshot.tensors.items():
            save_file(_storable(tensors), beside / f"{name}{_SUFFIX}")
        values = {"format_version": FORMAT_VERSION, **snapshot.values}
        (beside / _STATE).write_text(json.dumps(values, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        digests = {path.name: _sha256(path) for path in sorted(beside.iterdir())}
        (beside / _MANIFEST).write_text(json.dumps(digests, indent=2) + "\n", encoding="utf-8")
        for path in (*beside.iterdir(), beside):
            _fsync(path)
        shutil.rmtree(final, ignore_errors=True)
        beside.replace(final)
        _fsync(self.folder)
        self._drop_old(best_step)
        return final

    def newest(self) -> Path | None:
        """Return the newest checkpoint, or None."""
        found = self._all()
        return found[-1] if found else None

    def at(self, step: int) -> Path:
        """Return the checkpoint of `step`. Raise `CheckpointError` when it is not there."""
        path = self._path(step)
        if not path.is_dir():
            raise CheckpointError(f"{path}: no such checkpoint (see {self.folder})")
        return path

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def _all(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("step-*") if path.is_dir())

    def _drop_old(self, best_step: int) -> None:
        best = self._path(best_step)
        for path in self._all()[: -self.keep]:
            if path != best:
                shutil.rmtree(path, ignore_errors=True)


def verify(path: Path) -> None:
    """Raise `CheckpointError` when a file of checkpoint `path` is missing or not what was written."""
    try:
        digests = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
        if not isinstance(digests, dict) or not digests.keys() >= _ALWAYS:
            raise ValueError(f"{_MANIFEST} does not list the checkpoint's files")
        unlisted = sorted({each.name for each in path.glob(f"*{_SUFFIX}")} - digests.keys())
        if unlisted:
            raise ValueError(f"{_MANIFEST} does not list {unlisted[0]}")
        damaged = next((name for name, digest in digests.items() if _sha256(path / name) != digest), None)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error} (remove it to use the one before)") from None
    if damaged:
        raise CheckpointError(f"{path / damaged}: is damaged: its SHA-256 is not the manifest's (remove {path.name})")


def read_state(path: Path) -> dict[str, Any]:
    """Return `state.json` of checkpoint `path`. Raise `CheckpointError` when it cannot be used."""
    try:
        values = json.loads((path / _STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path / _STATE}: cannot be read: {error} (remove {path.name} to use the last)"
        ) from None
    version = values.get("format_version") if isinstance(values, dict) else None
    if version != FORMAT_VERSION:
        fix = "update paceline" if isinstance(version, int) and version > FORMAT_VERSION else "train it again"
        raise CheckpointError(f"{path}: has format {version}, this paceline reads {FORMAT_VERSION} ({fix})")
    assert isinstance(values, dict)
    return values


def load_part(path: Path, name: str) -> dict[str, Tensor]:
    """Return the whole tensors of part `name`, on the CPU; none where checkpoint `path` has no such part.

    Does not look for damage, which `verify` and `load_model` do. Raise `CheckpointError` for a file of another kind.
    """
    file = path / f"{name}{_SUFFIX}"
    if not file.exists():
        return {}
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file}: cannot be read: {error} (remove {path.name} to use the last)") from None


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by the model's own names, whether or not it is compiled or wrapped.

    They are the live tensors, and shards where the model is sharded: `Strategy.gather` makes them whole.
    """
    return {_plain(name): tensor for name, tensor in _unwrapped(model).state_dict().items()}


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
    inner = _unwrapped(model)
    own = {_plain(name): (name, tensor) for name, tensor in inner.state_dict().items()}
    laid_out = {}
    for plain, tensor in tensors.items():
        name, like = own.get(plain, (plain, tensor))
        laid_out[name] = shard_like(tensor, like)
    inner.load_state_dict(laid_out)


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimizer's state as `NUMBER.KEY`; parameters are numbered in the order of the optimizer's groups.

    They are the live tensors, and shards where the parameters are: `Strategy.gather` makes them whole.
    """
    state = optimizer.state_dict()["state"]
    return {
        f"{number}.{key}": value
        for number, values in state.items()
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
        own = {key: value for key, value in values.items() if value.ndim and value.shape == parameters[number].shape}
        optimizer.state[parameters[number]].update(own)


def weights_sha256(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of names, types, shapes and bytes of whole `tensors`, sorted by name (see `model_tensors`)."""
    digest = hashlib.sha256()
    for name, tensor in sorted(_storable(tensors).items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return the module that was wrapped for several devices or compiled, however often."""
    while True:
        if isinstance(model, DistributedDataParallel | DataParallel):
            model = model.module
        elif _COMPILED in dict(model.named_children()):
            model = model.get_submodule(_COMPILED)
        else:
            return model


def _plain(name: str) -> str:
    """Return `name` without what compiling a part of the model has put into it."""
    return ".".join(word for word in name.split(".") if word != _COMPILED)


def _like(parameter: Tensor, value: Tensor, shard_like: ShardLike) -> Tensor:
    """Return `value` in the layout of its parameter; fused updates are slow on a pair that differs."""
    if not value.ndim or value.shape != parameter.shape:
        return value
    return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(shard_like(value, parameter))


def _storable(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous host tensors of their own, which is what safetensors stores."""
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
