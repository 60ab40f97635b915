"""Save and load checkpoints. A run can be killed at any moment and resumes from the newest one."""

from paceline.training.checkpoint.format import (
    FORMAT_VERSION,
    Snapshot,
    find_damage,
    is_weights_only,
    load_tensor_group,
    read_state,
    verify_checkpoint,
    weights_digest,
)
from paceline.training.checkpoint.state_dict import (
    ConvertTensors,
    ShardLike,
    load_model,
    load_model_tensors,
    load_optimizer,
    model_tensors,
    optimizer_tensors,
    weights_sha256,
)
from paceline.training.checkpoint.storage import CheckpointStorage, KeepPolicy
from paceline.training.checkpoint.writer import CheckpointWriter, FinalSave

__all__ = [
    "FORMAT_VERSION",
    "CheckpointStorage",
    "CheckpointWriter",
    "ConvertTensors",
    "FinalSave",
    "KeepPolicy",
    "ShardLike",
    "Snapshot",
    "find_damage",
    "is_weights_only",
    "load_model",
    "load_model_tensors",
    "load_optimizer",
    "load_tensor_group",
    "model_tensors",
    "optimizer_tensors",
    "read_state",
    "verify_checkpoint",
    "weights_digest",
    "weights_sha256",
]
