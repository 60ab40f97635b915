"""Names and colours of the parts of a run's time, the same in every bar, table and sentence."""

from typing import Final

NAMES: Final = {
    "start_up": "start-up",
    "compile": "compile",
    "warmup": "warm-up",
    "data_wait": "data wait",
    "h2d": "copy to device",
    "device_augment": "augment",
    "forward": "forward",
    "loss": "loss",
    "backward": "backward",
    "exposed_communication": "communication",
    "optimizer": "optimizer",
    "other": "other",
    "epoch_boundary": "epoch boundary",
    "evaluate": "evaluation",
    "checkpoint": "checkpoint",
    "trace": "trace",
    "finish": "finish",
    "residual": "not explained",
}


def name(part: str) -> str:
    """Return what a stage or pause is called on the page; one that nobody knows by its own name."""
    return NAMES.get(part, part.replace("_", " "))


def colour(part: str) -> str:
    """Return the style sheet's class of a stage or pause."""
    return f"c-{part.replace('_', '-')}" if part in NAMES else "c-unknown"
