"""Operations that torch has only for GPUs: synchronized batch norm (torch.nn.SyncBatchNorm).

Ioffe & Szegedy 2015 (arXiv 1502.03167); names and arguments are those of torch's operations.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def batch_norm_stats(images: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the mean and 1 / sqrt(variance + eps) of each channel, float32 [C]."""
    variance, mean = torch.var_mean(images.float(), _others(images), correction=0)
    return mean, torch.rsqrt(variance + eps)


def batch_norm_elemt(
    images: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor, eps: float
) -> Tensor:
    """Return `images` normalized, in their memory format."""
    normalised = (images.float() - _wide(mean, images)) * _wide(invstd, images)
    normalised = normalised if weight is None else normalised * _wide(weight.float(), images)
    normalised = normalised if bias is None else normalised + _wide(bias.float(), images)
    return _like(normalised, images)


def batch_norm_gather_stats_with_counts(
    images: Tensor,
    mean: Tensor,
    invstd: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the statistics of all ranks from those of each, [R, C], and update the running ones."""
    share = (counts / counts.sum())[:, None].float()
    total = float(counts.sum())
    of_all = (share * mean).sum(0)
    variance = (share * (invstd.pow(-2) - eps + (mean - of_all) ** 2)).sum(0)
    if running_mean is not None:
        running_mean.lerp_(of_all.to(running_mean.dtype), momentum)
    if running_var is not None:
        running_var.lerp_((variance * total / (total - 1)).to(running_var.dtype), momentum)
    return of_all, torch.rsqrt(variance + eps)


def batch_norm_backward_reduce(
    gradient: Tensor, images: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None, *requested: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the two sums [C] that ranks share, and the gradients of weight and bias."""
    wide = gradient.float()
    summed = wide.sum(_others(images))
    with_images = (wide * (images.float() - _wide(mean, images))).sum(_others(images))
    dtype = mean.dtype if weight is None else weight.dtype
    _, wants_weight, wants_bias = requested
    of_weight = (with_images * invstd).to(dtype) if wants_weight else None
    return summed, with_images, of_weight, summed.to(dtype) if wants_bias else None


def batch_norm_backward_elemt(
    gradient: Tensor,
    images: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    summed: Tensor,
    with_images: Tensor,
    counts: Tensor,
) -> Tensor:
    """Return the gradient of the images."""
    total = float(counts.sum())
    slope = _wide(with_images * invstd * invstd / total, images)
    wide = gradient.float() - _wide(summed / total, images) - (images.float() - _wide(mean, images)) * slope
    scale = invstd if weight is None else invstd * weight.float()
    return _like(wide * _wide(scale, images), images)


def _others(images: Tensor) -> list[int]:
    return [dim for dim in range(images.ndim) if dim != 1]


def _wide(values: Tensor, images: Tensor) -> Tensor:
    return values.view(1, -1, *[1] * (images.ndim - 2))


def _like(values: Tensor, images: Tensor) -> Tensor:
    return torch.empty_like(images).copy_(values)


SUBSTITUTES: dict[str, Callable[..., Any]] = {
    each.__name__: each
    for each in (
        batch_norm_stats,
        batch_norm_elemt,
        batch_norm_gather_stats_with_counts,
        batch_norm_backward_reduce,
        batch_norm_backward_elemt,
    )
}
