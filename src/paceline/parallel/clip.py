"""Measure and shorten gradients. Knows nothing of ranks: what of a gradient is elsewhere, the strategies add."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


def gradient_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the L2 norm of all `gradients` as one vector, [], in their dtype and in float32 at least.

    A norm in 16 bits would overflow in float16 and have two digits in bfloat16.
    """
    if any(gradient.dtype.itemsize < 4 for gradient in gradients):
        norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
        gradients = norms  # of which the norm is the same
    norm: Tensor = get_total_norm(gradients)
    return norm


def clip_to_norm(parameters: Sequence[Tensor], norm: Tensor, max_norm: float) -> Tensor:
    """Scale the gradients of `parameters`, whose norm is `norm`, to `max_norm` if they are longer; return float32 [].

    The factor is max_norm / (norm + 1e-6), as in torch (Pascanu et al. 2013, arXiv 1211.5063).
    """
    if math.isfinite(max_norm):
        clip_grads_with_norm_(parameters, max_norm, norm)
    return norm.float()
