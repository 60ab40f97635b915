"""Batch normalization with statistics over all ranks: torch's on GPUs, our own on CPUs, where torch has none.

In training every rank must run the same layers in the same order; evaluation does not communicate.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.core.errors import RecipeError

_TORCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class SyncBatchNorm(_BatchNorm):
    """Batch norm of CPU tensors [N, C, ...] over all ranks, whose N may differ, with statistics of at least float32.

    In evaluation, in a world of one, and without a process group it is `nn.BatchNorm2d`.
    """

    def forward(self, images: Tensor) -> Tensor:
        """Return `images` normalized. Raise `ValueError` for a single value per channel."""
        is_alone = not dist.is_initialized() or dist.get_world_size() == 1
        if is_alone or not self.training:
            output: Tensor = super().forward(images)
        else:
            output = self._over_ranks(images)
        return output

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _over_ranks(self, images: Tensor) -> Tensor:
        self._check_input_dim(images)
        output: Tensor
        output, mean, var, count = _Normalize.apply(images, self.weight, self.bias, self.eps)
        if self.track_running_stats:
            self._track(mean, var * (count / (count - 1)))
        return output

    def _track(self, mean: Tensor, unbiased_var: Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        momentum = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        with torch.no_grad():
            self.running_mean.mul_(1 - momentum).add_(mean.to(self.running_mean.dtype), alpha=momentum)
            self.running_var.mul_(1 - momentum).add_(unbiased_var.to(self.running_var.dtype), alpha=momentum)

    def _check_input_dim(self, input: Tensor) -> None:
        if input.ndim < 2:
            raise ValueError(f"batch normalization needs [N, C, ...], not {list(input.shape)}")


class _Normalize(torch.autograd.Function):
    """Batch normalization (Ioffe and Szegedy 2015, arXiv 1502.03167) with sums over the ranks in both directions."""

    @staticmethod
    def forward(
        ctx: Any, images: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return [N, C, ...] normalized, and mean [C], biased variance [C] and count [] over all ranks."""
        dtype, shape = _statistics_dtype(images), _channels(images)
        wide = images.to(dtype)
        mean, var, count = _moments_over_ranks(wide)
        inverse_std = (var + eps).rsqrt()
        scale = inverse_std if weight is None else inverse_std * weight.to(dtype)
        # Subtract the mean first: torch's order, images * scale + shift, loses digits if the mean is large.
        output = (wide - mean.view(shape)).mul_(scale.view(shape))
        if bias is not None:
            output.add_(bias.to(dtype).view(shape))
        ctx.save_for_backward(images, weight, mean, inverse_std, count)
        ctx.mark_non_differentiable(mean, var, count)
        return output.to(images.dtype), mean, var, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *statistics: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        """Return the gradient of `images` for all ranks' losses, and of weight and bias for this rank's."""
        images, weight, mean, inverse_std, count = ctx.saved_tensors
        dtype, shape = mean.dtype, _channels(images)
        others = [axis for axis in range(images.ndim) if axis != 1]
        wide_grad = grad.to(dtype)
        normalized = (images.to(dtype) - mean.view(shape)) * inverse_std.view(shape)
        local = torch.stack([wide_grad.sum(others), (wide_grad * normalized).sum(others)])
        total = local.clone()
        dist.all_reduce(total)
        mean_grad, mean_slope = (each.view(shape) for each in total / count)
        scale = inverse_std if weight is None else inverse_std * weight.to(dtype)
        grad_images = (wide_grad - mean_grad - normalized * mean_slope) * scale.view(shape)
        # DDP averages the gradients of weight and bias over the ranks, as of every parameter.
        if weight is None:
            return grad_images.to(images.dtype), None, None, None
        return grad_images.to(images.dtype), local[1].to(weight.dtype), local[0].to(weight.dtype), None


def convert_sync_batch_norm(model: nn.Module, device: torch.device) -> nn.Module:
    """Replace every batch norm of `model` in place, with its parameters, buffers and mode; return the model.

    Raise `RecipeError` for a subclass that does more than normalize, as in some timm models, since that would be lost.
    """
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and type(module) not in (*_TORCH_NORMS, SyncBatchNorm, nn.SyncBatchNorm):
            raise RecipeError(
                f"model.norm: sync_batch cannot replace {name or 'the model'} ({type(module).__name__}), "
                "which does more than normalize (set model.norm=batch)"
            )
    if device.type == "cuda":
        return nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-any-return, no-untyped-call]
    if isinstance(model, _TORCH_NORMS):
        return _converted(model)
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, _TORCH_NORMS):
                setattr(module, name, _converted(child))
    return model


def _converted(norm: _BatchNorm) -> SyncBatchNorm:
    # The same tensors, not copies: an optimizer or EMA may refer to them.
    converted = SyncBatchNorm(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
    for name in ("weight", "bias"):
        converted.register_parameter(name, getattr(norm, name))
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        converted.register_buffer(name, getattr(norm, name))
    return converted.train(norm.training)


def _moments_over_ranks(images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean [C], biased variance [C] and count [] of the values of each channel on all ranks."""
    # Combine sums of squared deviations from each rank's mean (Chan, Golub and LeVeque 1979, Updating Formulae and a
    # Pairwise Algorithm for Computing Sample Variances): a mean square minus a squared mean loses digits if the mean is
    # large. Every rank adds the same numbers in the same order.
    others = [axis for axis in range(images.ndim) if axis != 1]
    local_var, local_mean = torch.var_mean(images, others, correction=0)
    local_count = torch.full_like(local_mean[:1], images.numel() / images.shape[1])
    local = torch.cat([local_mean, local_var, local_count])
    all_ranks = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(all_ranks, local)
    table = torch.stack(all_ranks)  # [W, 2C + 1]
    means, variances = table[:, :-1].chunk(2, dim=1)
    counts = table[:, -1:]
    count = counts.sum()
    if count <= 1:
        raise ValueError(f"batch normalization needs more than one value per channel, not {list(images.shape)}")
    mean = (means * counts).sum(0) / count
    var = ((variances + (means - mean).square()) * counts).sum(0) / count
    return mean, var, count


def _statistics_dtype(images: Tensor) -> torch.dtype:
    return torch.promote_types(images.dtype, torch.float32)


def _channels(images: Tensor) -> tuple[int, ...]:
    """Return the shape that broadcasts one value per channel over `images`."""
    return (1, -1) + (1,) * (images.ndim - 2)
