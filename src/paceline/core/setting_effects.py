"""Classify recipe fields: those that change the trained model, and those that change the time of a step."""

from typing import Final

_CHANGES_RESULT: Final = (
    "seed",
    "data.mean",
    "data.std",
    "data.source.split_seed",
    "data.split",
    "model.weights",
    "model.zero_init_residual",
    "optim",
    "schedule",
    "train.class_weights",
    "train.label_smoothing",
    "train.loss",
    "train.ema.decay",
    "train.ema.warmup",
    "train.max_time",
    "train.monitor",
    "train.patience",
    "train.stop",
)
"""Dotted paths of fields, or of sections with all their fields."""
_CHANGES_RESULT_AND_SPEED: Final = (
    "optim.name",
    "optim.implementation",
    "optim.newton_schulz_steps",
    "optim.centered",
    "optim.args",
)
"""Exceptions in `optim` that are chosen for speed too. `args` of a custom optimizer may do anything."""
_CHANGES_RESULT_AND_STEP: Final = (
    "optim.momentum",
    "optim.nesterov",
    "optim.rescale",
    "optim.decay_norm_and_bias",
    "optim.norm_and_bias_lr",
    "optim.layer_decay",
)
"""Fields that are chosen for accuracy and add some work or parameter groups to a step."""


def changes_result(path: str) -> bool:
    """Return whether the field at a dotted path is chosen for accuracy, even if it changes the time of a step."""
    return _is_in(path, _CHANGES_RESULT) and not _is_in(path, _CHANGES_RESULT_AND_SPEED)


def changes_result_only(path: str) -> bool:
    """Return whether the field at a dotted path changes the trained model but not the time of a step.

    False for fields that change both (batch size, augmentation, model) or neither (log interval).
    """
    return changes_result(path) and not _is_in(path, _CHANGES_RESULT_AND_STEP)


def _is_in(path: str, places: tuple[str, ...]) -> bool:
    return any(path == place or path.startswith(f"{place}.") for place in places)
