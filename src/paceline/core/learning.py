"""Which settings of a recipe say what is learnt, and not how fast: accuracy judges them, never speed. Pure."""

from typing import Final

_LEARNT: Final = (
    "seed",
    "data.mean",
    "data.std",
    "data.source.split_seed",
    "data.source.val_fraction",
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
_PACED: Final = ("optim.name", "optim.implementation", "optim.newton_schulz_steps", "optim.centered", "optim.args")
"""Those of an optimizer that make a step of it longer or shorter; what one's own takes from `args` nobody knows."""


def only_learning(path: str) -> bool:
    """Return whether the field at a dotted path changes what is learnt, and cannot change how long a step takes.

    What changes both, such as the batch size, the augmentation or the network, is none of these; nor is what changes
    neither, such as how often there is a log.
    """
    return _is_in(path, _LEARNT) and not _is_in(path, _PACED)


def _is_in(path: str, places: tuple[str, ...]) -> bool:
    return any(path == place or path.startswith(f"{place}.") for place in places)
