"""Switch a model to evaluation mode temporarily, and restore the mode of every module."""

import contextlib
from collections.abc import Iterator

from torch import nn

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@contextlib.contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Context manager: put `model` into evaluation mode, then restore the mode of every module."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        # Call the model's own `train()`, which may do more than set modes, then correct each module: the default
        # `train()` would put frozen modules into training mode.
        for module, was_training in modes:  # from the root down, as each call changes all descendants
            if module is model or module.training != was_training:
                module.train(was_training)


@contextlib.contextmanager
def use_batch_statistics(model: nn.Module) -> Iterator[bool]:
    """Context manager: let the trained BatchNorm layers of `model` normalize by their batch, running statistics
    untouched.

    All other modules are in evaluation mode. Yields whether there are such layers: frozen and synchronized ones do not
    count, as SyncBatchNorm would need the other ranks.
    """
    norms = [
        each
        for each in model.modules()
        if isinstance(each, _BATCH_NORMS) and _is_torch_batch_norm(each) and each.training
    ]
    tracking = [each.track_running_stats for each in norms]
    with eval_mode(model):
        for each in norms:
            each.training, each.track_running_stats = True, False  # neither reads nor updates the buffers
        try:
            yield bool(norms)
        finally:
            for each, tracks in zip(norms, tracking, strict=True):
                each.training, each.track_running_stats = False, tracks


def _is_torch_batch_norm(norm: nn.Module) -> bool:
    """Return whether `norm` is torch's own class; a subclass may behave differently in training."""
    return type(norm) in _BATCH_NORMS


def find_thawed_modules(modes_before: dict[str, bool], model: nn.Module) -> list[str]:
    """Return the names of modules that were in evaluation mode before and are in training mode now."""
    return [name for name, module in model.named_modules() if module.training and not modes_before.get(name, True)]


def record_modes(model: nn.Module) -> dict[str, bool]:
    """Return for each module, by name, whether it is in training mode."""
    return {name: module.training for name, module in model.named_modules()}
