"""Names of the stages of a training step and of the pauses between steps."""

from typing import Final

DATA_WAIT: Final = "data_wait"
EXPOSED: Final = "exposed_communication"
CAPTURED: Final = "captured_step"
OTHER: Final = "other"
PREPARE: Final = "prepare"
"""From the arrival of a batch to the forward that trains on it. Only `paceline watch` tells this stage apart."""
SYNC: Final = "sync"
"""The host waits for values of tensors, as in `loss.item()`. Only `paceline watch` tells this stage apart."""
LOG: Final = "log"
"""Time in log handlers and trackers. Only `paceline watch` tells this stage apart."""
EPOCH_BOUNDARY: Final = "epoch_boundary"
TRACE: Final = "trace"
CAPTURE: Final = "capture"
UNFREEZE: Final = "unfreeze"
WEIGH: Final = "weigh"
"""The part of the pauses `evaluate` that measures how often training images are drawn (`data.sampler=hard`)."""
FINISH: Final = "finish"

COMPUTE: Final = ("device_augment", "forward", "loss", "backward", CAPTURED, "optimizer")
"""Stages in which the device computes. A captured step replaces those from augmentation to the optimizer."""
STAGES: Final = (
    DATA_WAIT,
    "h2d",
    "device_augment",
    "forward",
    "loss",
    "backward",
    EXPOSED,
    CAPTURED,
    "optimizer",
    OTHER,
)
"""All stages, in the order of a step."""
WATCHED: Final = (*STAGES[:2], PREPARE, *STAGES[2:-1], SYNC, LOG, OTHER)
"""Stages of a training script that paceline did not write, in the order of a step."""
WORK: Final = tuple(name for name in STAGES if name != EXPOSED)
"""Stages without the wait for other ranks."""
PAUSES: Final = (EPOCH_BOUNDARY, "evaluate", "checkpoint", TRACE, CAPTURE, UNFREEZE)
"""Time outside of steps: starting and ending a loader, evaluations, checkpoints, starting and ending a profiler,
CUDA graph capture, and preparing the model once frozen parameters train.
"""

_DISPLAY_NAMES: Final = {
    "h2d": "copy to device",
    "device_augment": "augment on device",
    PREPARE: "preparing the batch",
    SYNC: "reading values",
    LOG: "logging",
    EPOCH_BOUNDARY: "starting the loader",
    "evaluate": "evaluation",
    "checkpoint": "checkpoints",
    TRACE: "tracing",
    CAPTURE: "capturing the step",
    UNFREEZE: "unfreezing",
    "start_up": "start-up",
    "several_ranks": "cost of several ranks",
    "between_nodes": "communication between nodes",
    "residual": "not attributed",
}


def display_name(name: str) -> str:
    """Return the display name of a stage or a pause; other names only have their underscores replaced."""
    return _DISPLAY_NAMES.get(name) or name.replace("_", " ")
