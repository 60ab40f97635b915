"""The stages of a training step and the pauses between steps: one list of names for clocks, results and pages."""

from typing import Final

DATA_WAIT: Final = "data_wait"
EXPOSED: Final = "exposed_communication"
OTHER: Final = "other"
EPOCH_BOUNDARY: Final = "epoch_boundary"
TRACE: Final = "trace"
FINISH: Final = "finish"

COMPUTE: Final = ("device_augment", "forward", "loss", "backward", "optimizer")
"""Stages in which the device computes."""
STAGES: Final = (
    DATA_WAIT,
    "h2d",
    "device_augment",
    "forward",
    "loss",
    "backward",
    EXPOSED,
    "optimizer",
    OTHER,
)
"""What an engine and its strategy charge time to, in the order of a step."""
WORK: Final = tuple(name for name in STAGES if name != EXPOSED)
"""Stages in which a rank does not wait for others."""
PAUSES: Final = (EPOCH_BOUNDARY, "evaluate", "checkpoint", TRACE)
"""What is no step: a loader that starts or ends, evaluations, checkpoints, and a profiler that starts or ends."""

_SPOKEN: Final = {
    "h2d": "copy to device",
    "device_augment": "augment on device",
    EPOCH_BOUNDARY: "starting the loader",
    "evaluate": "evaluation",
    "checkpoint": "checkpoints",
    TRACE: "tracing",
    "residual": "not explained",
}


def spoken(name: str) -> str:
    """Return what a person calls a stage or a pause; any other name is said with spaces."""
    return _SPOKEN.get(name) or name.replace("_", " ")
