"""Which settings of a recipe say what is learnt: accuracy judges them, and speed only those that set it too. Pure."""

from typing import Final

_CHANGES_RESULT: Final = (
    "seed",
    "data.mean",
    "data.std",
    "data.source.split_seed",
    "model.weights",
    "model.zero_init_residual",
    "optim",
    "schedule",
    "train.class_weights",
    "train.label_smoothing",
    "train.ema.decay",
    "train.ema.warmup",
    "train.stop",
)
"""Dotted paths of fields, and of sections all of whose fields are meant."""
_CHANGES_RESULT_AND_SPEED: Final = (
    "optim.name",
    "optim.implementation",
    "optim.newton_schulz_steps",
    "optim.centered",
    "optim.args",
)
"""Those of an optimizer that make a step of it longer or shorter; what one's own takes from `args` nobody knows."""
_CHANGES_RESULT_BELOW: Final = (
    "optim.momentum",
    "optim.nesterov",
    "optim.rescale",
    "optim.decay_norm_and_bias",
    "optim.norm_and_bias_lr",
    "optim.layer_decay",
)
"""Those that are chosen for what is learnt, and add work to a step or groups of parameters to it beside."""


def changes_result(path: str) -> bool:
    """Return whether the field at a dotted path is chosen for what is learnt, whatever it does to a step's time."""
    return _is_in(path, _CHANGES_RESULT) and not _is_in(path, _CHANGES_RESULT_AND_SPEED)


def changes_result_only(path: str) -> bool:
    """Return whether the field at a dotted path changes what is learnt, and cannot change how long a step takes.

    What changes both, such as the batch size, the augmentation or the network, is none of these; nor is what changes
    neither, such as how often there is a log.
    """
    return changes_result(path) and not _is_in(path, _CHANGES_RESULT_BELOW)


def _is_in(path: str, places: tuple[str, ...]) -> bool:
    return any(path == place or path.startswith(f"{place}.") for place in places)
