"""Save and load the state of a run: safetensors for tensors, JSON for the rest, a digest of each file.

A checkpoint is a folder written beside its final name and moved into place whole, so a kill at any moment leaves
the previous one. Nothing is unpickled, so a checkpoint cannot run code.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from paceline.core.errors import CheckpointError
from paceline.train.schedule import Schedule
from paceline.train.state import TrainState

FORMAT_VERSION = 1
_MODEL, _OPTIMIZER, _STATE, _MANIFEST = "model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of a run: folders `step-00001234`, of which the `keep` newest and the best stay."""

    folder: Path
    keep: int

    def save(
        self,
        state: TrainState,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        schedule: Schedule,
        facts: Mapping[str, Any],
    ) -> Path:
        """Write a checkpoint and return its folder. `facts` (recipe hash, world size, ...) go into `state.json`."""
        final = self._path(state.step)
        beside = self.folder / f".{final.name}.tmp"
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        save_file(_storable(model.state_dict()), beside / _MODEL)
        save_file(_storable(_optimizer_tensors(optimizer)), beside / _OPTIMIZER)
        values = {
            "format_version": FORMAT_VERSION,
            "train": state.to_dict(),
            "schedule": schedule.state(),
            **facts,
        }
        (beside / _STATE).write_text(json.dumps(values, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        digests = {name: _sha256(beside / name) for name in (_MODEL, _OPTIMIZER, _STATE)}
        (beside / _MANIFEST).write_text(json.dumps(digests, indent=2) + "\n", encoding="utf-8")
        for path in (*beside.iterdir(), beside):
            _fsync(path)
        shutil.rmtree(final, ignore_errors=True)
        beside.replace(final)
        _fsync(self.folder)
        self._drop_old(state)
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

    def _drop_old(self, state: TrainState) -> None:
        best = self._path(state.best_step)
        for path in self._all()[: -self.keep]:
            if path != best:
                shutil.rmtree(path, ignore_errors=True)


def load_model(path: Path, model: nn.Module) -> None:
    """Load the weights and buffers of checkpoint `path` into `model`. Raise `CheckpointError` for damage."""
    _verify(path)
    try:
        model.load_state_dict(load_file(path / _MODEL))
    except RuntimeError as error:
        first = " ".join(str(error).split())[:150]
        raise CheckpointError(f"{path}: does not fit the model: {first} (use the run's own recipe)") from None


def load_rest(path: Path, optimizer: torch.optim.Optimizer, schedule: Schedule) -> TrainState:
    """Load optimizer and schedule from checkpoint `path`, after `load_model`; return the progress."""
    tensors = load_file(path / _OPTIMIZER)
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        number, _, key = name.partition(".")
        state.setdefault(int(number), {})[key] = tensor
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    laid_out = {
        number: {key: _like(parameters[number], value) for key, value in values.items()}
        for number, values in state.items()
    }
    optimizer.load_state_dict({"state": laid_out, "param_groups": optimizer.state_dict()["param_groups"]})
    values = read_state(path)
    schedule.load(values["schedule"])
    return TrainState.from_dict(values["train"])


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
        raise CheckpointError(f"{path}: has format {version}, this paceline reads {FORMAT_VERSION} (update paceline)")
    assert isinstance(values, dict)
    return values


def weights_sha256(model: nn.Module) -> str:
    """Return the SHA-256 of names, types, shapes and bytes of all parameters and buffers, sorted by name."""
    digest = hashlib.sha256()
    for name, tensor in sorted(_storable(model.state_dict()).items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    state = optimizer.state_dict()["state"]
    return {
        f"{number}.{key}": value
        for number, values in state.items()
        for key, value in values.items()
        if isinstance(value, Tensor)
    }


def _like(parameter: Tensor, value: Tensor) -> Tensor:
    """Return `value` in the memory format of its parameter; fused updates are slow on a pair that differs."""
    if value.shape != parameter.shape:
        return value
    return torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _storable(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous host tensors of their own, which is what safetensors stores."""
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}


def _verify(path: Path) -> None:
    try:
        digests = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
        if not isinstance(digests, dict) or set(digests) != {_MODEL, _OPTIMIZER, _STATE}:
            raise ValueError(f"{_MANIFEST} does not list the checkpoint's files")
        damaged = next((name for name, digest in digests.items() if _sha256(path / name) != digest), None)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error} (remove it to use the one before)") from None
    if damaged:
        raise CheckpointError(f"{path / damaged}: is damaged: its SHA-256 is not the manifest's (remove {path.name})")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
