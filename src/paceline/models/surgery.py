"""Changes to a network that someone else defined."""

import torch
from torch import Tensor, nn

from paceline.core.errors import RecipeError

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def adapt_input_channels(model: nn.Module, channels: int) -> None:
    """Replace the first convolution of `model`, in place, by one that reads `channels` channels.

    Kernel, stride, padding, bias, device and dtype stay. New filters, float [out_channels, channels, kH, kW],
    are drawn from the old ones' values, with repetition: that keeps the distribution the network was
    initialised with, without knowing which it was. The scale is exact for schemes that count outputs (ResNet,
    VGG, EfficientNet); one that counts inputs would multiply it by sqrt(old_channels / channels). Meant for
    untrained networks.
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
        replacement.weight.copy_(_resample(conv.weight, replacement.weight.shape))
    if conv.bias is not None:
        replacement.bias = conv.bias
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, replacement)


def _resample(weight: Tensor, shape: torch.Size) -> Tensor:
    chosen = torch.randint(weight.numel(), shape, device=weight.device)
    return weight.flatten()[chosen]


def set_drop_path(model: nn.Module, drop_path: float) -> bool:
    """Scale the stochastic depth of a torchvision `model`, in place, so that `drop_path` is its largest probability.

    The other branches keep their proportion to it. Return False for a model without.
    """
    from torchvision.ops import StochasticDepth

    branches = [module for module in model.modules() if isinstance(module, StochasticDepth)]
    largest = max((branch.p for branch in branches), default=0.0)
    if largest == 0:
        return False
    for branch in branches:
        branch.p = drop_path * (branch.p / largest)
    return True


def check_can_synchronise(model: nn.Module, name: str) -> None:
    """Raise `RecipeError` when the batch norms of `model`, called `name`, cannot be made to count over all ranks."""
    batch_norms = [module for module in model.modules() if isinstance(module, _BATCH_NORMS)]
    if not batch_norms:
        raise RecipeError(
            f"model.norm: sync_batch has no effect on {name}, which has no batch norms (set model.norm=batch)"
        )
    # timm's BatchNormAct2d is a batch norm and its activation in one; exchanging the norm would lose the activation.
    if any(type(module) not in _BATCH_NORMS for module in batch_norms):
        raise RecipeError(
            f"model.norm: sync_batch cannot replace the batch norms of {name}, which hold activations too "
            "(set model.norm=batch, or use a torchvision: model)"
        )
