"""Save and load checkpoints. A run can be killed at any moment and resumes from the newest one."""

from paceline.train.checkpoint.folder import Checkpoints, Keep
from paceline.train.checkpoint.format import FORMAT_VERSION, Snapshot, damage_of, load_part, read_state, verify
from paceline.train.checkpoint.tensors import (
    ShardLike,
    load_model,
    load_model_tensors,
    load_optimizer,
    model_tensors,
    optimizer_tensors,
    weights_sha256,
)
from paceline.train.checkpoint.writer import Last, Writer

__all__ = [
    "FORMAT_VERSION",
    "Checkpoints",
    "Keep",
    "Last",
    "ShardLike",
    "Snapshot",
    "Writer",
    "damage_of",
    "load_model",
    "load_model_tensors",
    "load_optimizer",
    "load_part",
    "model_tensors",
    "optimizer_tensors",
    "read_state",
    "verify",
    "weights_sha256",
]
