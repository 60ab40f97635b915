"""Evaluate a network in between, and leave every module of it in the mode in which it was."""

import contextlib
from collections.abc import Iterator

from torch import nn

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put `model` into evaluation mode for a while.

    Afterwards its own `train()` is called, which may do more than set modes, and then every module gets back the mode
    that it had: a `train()` that nobody wrote would put frozen modules into training.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, was_training in modes:  # from the root down, since each call reaches all below
            if module is model or module.training != was_training:
                module.train(was_training)


@contextlib.contextmanager
def batch_statistics(model: nn.Module) -> Iterator[bool]:
    """Have the batch norms that `model` trains normalise by their batch for a while, running statistics untouched.

    All other modules are in evaluation mode meanwhile. It yields whether there are any: those that
    are frozen do not count, nor do synchronised ones, whose statistics would ask something of the other ranks.
    """
    norms = [each for each in model.modules() if isinstance(each, _BATCH_NORMS) and _is_plain(each) and each.training]
    kept = [each.track_running_stats for each in norms]
    with evaluating(model):
        for each in norms:
            each.training, each.track_running_stats = True, False  # buffers are then neither read nor moved
        try:
            yield bool(norms)
        finally:
            for each, tracks in zip(norms, kept, strict=True):
                each.training, each.track_running_stats = False, tracks


def _is_plain(norm: nn.Module) -> bool:
    """Return whether a batch norm is torch's own: one that inherits from it may do something else while training."""
    return type(norm) in _BATCH_NORMS


def thawed(modes_before: dict[str, bool], model: nn.Module) -> list[str]:
    """Return the names of the modules that were in evaluation mode before, and are in training now."""
    return [name for name, module in model.named_modules() if module.training and not modes_before.get(name, True)]


def modes(model: nn.Module) -> dict[str, bool]:
    """Return whether modules are in training, by name."""
    return {name: module.training for name, module in model.named_modules()}
