"""Checkpoint activations: keep only the input of each block, and compute the rest again in the backward pass."""

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from paceline.core.errors import RecipeError
from paceline.models.structure import find_blocks
from paceline.recipe.schema.model import Model


def checkpoint_activations(section: Model, model: nn.Module) -> None:
    """Checkpoint the activations of every block of `model`, in place, if the section says so.

    Gradients and BatchNorm statistics have the same bits as without. Raise `RecipeError` for a model without blocks.
    """
    if not section.checkpoint_activations:
        return
    blocks = find_blocks(model)
    if not blocks:
        raise RecipeError(
            f"model.checkpoint_activations: true has no effect on {section.name}, which has no repeated blocks "
            "(leave it out, or use a residual network or a transformer)"
        )
    for block in blocks:
        norms = [module for module in block.modules() if isinstance(module, _BatchNorm)]
        # On the instance, so that names of parameters stay as they are.
        block.forward = partial(_forward, block.forward, norms)


def _forward(forward: Any, norms: list[_BatchNorm], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    # A dense block appends to the list of tensors that it passes to each of its layers.
    args = tuple([*each] if isinstance(each, list) else each for each in args)
    contexts = partial(_build_contexts, norms)
    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def _build_contexts(
    norms: list[_BatchNorm],
) -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
    """Return the contexts of the forward pass and of its repetition."""
    return contextlib.nullcontext(), _keeping_statistics(norms)


@contextlib.contextmanager
def _keeping_statistics(norms: list[_BatchNorm]) -> Iterator[None]:
    """Leave running statistics as they are: the forward pass has updated them with this batch."""
    tracking = [norm for norm in norms if norm.training and norm.num_batches_tracked is not None]
    momenta = [norm.momentum for norm in tracking]
    counts = [norm.num_batches_tracked.clone() for norm in tracking if norm.num_batches_tracked is not None]
    for norm in tracking:
        norm.momentum = 0.0  # running * 1 + batch * 0; without tracking, other tensors would be kept for backward
    try:
        yield
    finally:
        for norm, momentum, num_batches in zip(tracking, momenta, counts, strict=True):
            norm.momentum = momentum
            assert norm.num_batches_tracked is not None
            norm.num_batches_tracked.copy_(num_batches)
