"""Evaluate a network in between, and leave every module of it in the mode in which it was."""

import contextlib
from collections.abc import Iterator

from torch import nn


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


def thawed(modes_before: dict[str, bool], model: nn.Module) -> list[str]:
    """Return the names of the modules that were in evaluation mode before, and are in training now."""
    return [name for name, module in model.named_modules() if module.training and not modes_before.get(name, True)]


def modes(model: nn.Module) -> dict[str, bool]:
    """Return whether modules are in training, by name."""
    return {name: module.training for name, module in model.named_modules()}
