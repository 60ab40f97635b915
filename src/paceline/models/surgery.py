"""Changes to a network that someone else defined."""

import torch
from torch import Tensor, nn


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
