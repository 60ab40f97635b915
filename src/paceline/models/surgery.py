"""In-place changes to models that other libraries define."""

import torch
from torch import Tensor, nn

from paceline.core.errors import RecipeError

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def adapt_input_channels(model: nn.Module, channels: int) -> None:
    """Replace the first convolution of `model`, in place, by one with `channels` input channels.

    Kernel size, stride, padding, bias, device and dtype are kept. Meant for untrained models.
    """
    name, conv = next((name, module) for name, module in model.named_modules() if isinstance(module, nn.Conv2d))
    if conv.in_channels == channels:
        return
    assert conv.groups == 1, f"{name} is a grouped convolution: it does not read the image"
    replacement = nn.Conv2d(
        channels,
        conv.out_channels,
        conv.kernel_size,  # type: ignore[arg-type]
        conv.stride,  # type: ignore[arg-type]
        conv.padding,  # type: ignore[arg-type]
        conv.dilation,  # type: ignore[arg-type]
        bias=conv.bias is not None,
        padding_mode=conv.padding_mode,
        device=conv.weight.device,
        dtype=conv.weight.dtype,
    )
    with torch.no_grad():
        # Resampling the old weights keeps the distribution of the initialization without knowing its scheme. The scale
        # is exact for schemes by fan-out (ResNet, VGG, EfficientNet). A scheme by fan-in would differ by a factor of
        # sqrt(old_channels / channels).
        replacement.weight.copy_(_resample_filters(conv.weight, replacement.weight.shape))
    if conv.bias is not None:
        replacement.bias = conv.bias
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, replacement)


def _resample_filters(weight: Tensor, shape: torch.Size) -> Tensor:
    chosen = torch.randint(weight.numel(), shape, device=weight.device)
    return weight.flatten()[chosen]


def set_drop_path(model: nn.Module, drop_path: float) -> bool:
    """Scale the stochastic depth of a torchvision `model`, in place, so that its largest probability is `drop_path`.

    Return False if the model has none.
    """
    from torchvision.ops import StochasticDepth

    branches = [module for module in model.modules() if isinstance(module, StochasticDepth)]
    largest = max((branch.p for branch in branches), default=0.0)
    if largest == 0:
        return False
    for branch in branches:
        branch.p = drop_path * (branch.p / largest)
    return True


def check_sync_batch_norm(model: nn.Module, name: str) -> None:
    """Raise `RecipeError` if the BatchNorm layers of `model`, called `name`, cannot be converted to SyncBatchNorm."""
    batch_norms = [module for module in model.modules() if isinstance(module, _BATCH_NORMS)]
    if not batch_norms:
        raise RecipeError(
            f"model.norm: sync_batch has no effect on {name}, which has no batch norms (set model.norm=batch)"
        )
    # timm's BatchNormAct2d includes the activation, which replacing the norm would lose.
    if any(type(module) not in _BATCH_NORMS for module in batch_norms):
        raise RecipeError(
            f"model.norm: sync_batch cannot replace the batch norms of {name}, which hold activations too "
            "(set model.norm=batch, or use a torchvision: model)"
        )
