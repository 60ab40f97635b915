"""Normalization layers, and convolutions whose bias and initialization match them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import nn

NormName = Literal["batch", "sync_batch", "group", "none"]
NormLayer = Callable[[int], nn.Module]

MAX_GROUPS = 32
"""Best number of groups in Wu and He 2018, Group Normalization (arXiv 1803.08494), table 3."""


def build_norm(norm: NormName) -> NormLayer:
    """Return a function from a number of channels to the normalization layer, [N, C, H, W] to the same shape."""
    match norm:
        case "batch" | "sync_batch":
            # `parallel` converts sync_batch to SyncBatchNorm later, when the ranks are known.
            return nn.BatchNorm2d
        case "group":
            return lambda channels: nn.GroupNorm(choose_num_groups(channels), channels)
        case "none":
            return lambda channels: nn.Identity()


def choose_num_groups(channels: int) -> int:
    """Return the largest number of groups, at most `MAX_GROUPS`, that divides `channels`."""
    return next(groups for groups in range(MAX_GROUPS, 0, -1) if channels % groups == 0)


@dataclass(frozen=True)
class LayerFactory:
    """Builds the layers of a residual network: norms, and convolutions that match them.

    With `zero_init_residual` every residual branch starts at zero, as in Goyal et al. 2017, Accurate, Large Minibatch
    SGD (arXiv 1706.02677), section 5.1.
    """

    norm: NormLayer
    has_norm: bool
    zero_init_residual: bool = False

    def conv(self, in_channels: int, out_channels: int, kernel_size: int, stride: int = 1) -> nn.Conv2d:
        """Return a convolution that keeps the image size at stride 1, initialized as in He et al. 2015 (arXiv
        1502.01852).

        It has a bias only without normalization. Biases start at 0. Weights are N(0, 2 / fan_out) with normalization
        and N(0, 2 / fan_in) without.
        """
        conv = nn.Conv2d(in_channels, out_channels, kernel_size, stride, kernel_size // 2, bias=not self.has_norm)
        # fan_out preserves the gradient's variance in the backward pass. Without a norm nothing rescales activations,
        # and fan_out would shrink them in a stem with few inputs and many outputs, so use fan_in.
        mode: Literal["fan_in", "fan_out"] = "fan_out" if self.has_norm else "fan_in"
        nn.init.kaiming_normal_(conv.weight, mode=mode, nonlinearity="relu")
        if conv.bias is not None:
            nn.init.zeros_(conv.bias)
        return conv

    def last_conv(self, in_channels: int, out_channels: int, kernel_size: int) -> nn.Conv2d:
        """Return the last convolution of a residual branch: all zero without normalization."""
        conv = self.conv(in_channels, out_channels, kernel_size)
        # Without norms each block adds its branch's variance, so activations grow exponentially with depth. Zero
        # branches make each block start as its shortcut, as in Fixup, Zhang et al. 2019 (arXiv 1901.09321); its scaled
        # first convolutions and scalar biases and multipliers are left out.
        if not self.has_norm:
            nn.init.zeros_(conv.weight)
        return conv

    def last_norm(self, channels: int) -> nn.Module:
        """Return the last norm of a residual branch, with scale 0 if `zero_init_residual`."""
        norm = self.norm(channels)
        if self.zero_init_residual:
            nn.init.zeros_(norm.get_parameter("weight"))
        return norm


def build_layer_factory(norm: NormName, *, zero_init_residual: bool = False) -> LayerFactory:
    """Return the layer factory for `norm`."""
    assert not (zero_init_residual and norm == "none"), "the schema refuses it: such branches start at zero anyway"
    return LayerFactory(build_norm(norm), norm != "none", zero_init_residual)


def scale_channels(channels: int, width: float) -> int:
    """Return `channels` times `width`, rounded, at least 1."""
    return max(1, round(channels * width))
