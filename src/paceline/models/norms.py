"""Normalisation layers, and what follows from their choice for convolutions: bias and initial weights.

Does not decide where a layer goes; that is each network's own file.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import nn

NormName = Literal["batch", "sync_batch", "group", "none"]
NormLayer = Callable[[int], nn.Module]

MAX_GROUPS = 32
"""Groups that work best in Wu and He 2018, Group Normalization (arXiv 1803.08494), table 3."""


def build_norm(norm: NormName) -> NormLayer:
    """Return what makes the normalisation of a number of channels: [N, C, H, W] to the same shape.

    `sync_batch` is the batch norm of one process: only where ranks are known can it learn to count over them.
    """
    match norm:
        case "batch" | "sync_batch":
            return nn.BatchNorm2d
        case "group":
            return lambda channels: nn.GroupNorm(num_groups(channels), channels)
        case "none":
            return lambda channels: nn.Identity()


def num_groups(channels: int) -> int:
    """Return the largest group count, `MAX_GROUPS` at most, that divides `channels`."""
    return next(groups for groups in range(MAX_GROUPS, 0, -1) if channels % groups == 0)


@dataclass(frozen=True)
class Layers:
    """The material of a residual network: a normalisation, and convolutions that suit it.

    A convolution has a bias exactly when no normalisation shifts its output. Biases start at 0 and filters are
    drawn as in He et al. 2015, Delving Deep into Rectifiers (arXiv 1502.01852). With a normalisation they are
    N(0, 2 / fan_out), fan_out = out_channels * kernel_size ** 2, which keeps the gradient's variance on the way
    back. Without one nothing rescales activations on the way forward, so they are N(0, 2 / fan_in): by fan_out
    a stem of few inputs and many outputs makes the image vanish, and the network hardly learns.

    With `zero_init_residual` every residual branch starts at zero, so a block starts as its shortcut: Goyal et
    al. 2017, Accurate, Large Minibatch SGD (arXiv 1706.02677), section 5.1.
    """

    norm: NormLayer
    is_normalised: bool
    zero_init_residual: bool = False

    def conv(self, in_channels: int, out_channels: int, kernel_size: int, stride: int = 1) -> nn.Conv2d:
        """Return an initialised convolution whose padding keeps the image's size at stride 1."""
        conv = nn.Conv2d(in_channels, out_channels, kernel_size, stride, kernel_size // 2, bias=not self.is_normalised)
        mode: Literal["fan_in", "fan_out"] = "fan_out" if self.is_normalised else "fan_in"
        nn.init.kaiming_normal_(conv.weight, mode=mode, nonlinearity="relu")
        if conv.bias is not None:
            nn.init.zeros_(conv.bias)
        return conv

    def last_conv(self, in_channels: int, out_channels: int, kernel_size: int) -> nn.Conv2d:
        """Return the convolution that ends a residual branch: all zero when nothing is normalised.

        Without normalisation each block adds its branch's variance to its input's, so activations grow
        exponentially with depth. Branches that start at zero make every block start as its shortcut, as in
        Fixup, Zhang et al. 2019 (arXiv 1901.09321), whose scaled-down first convolutions and scalar biases
        and multipliers are left out.
        """
        conv = self.conv(in_channels, out_channels, kernel_size)
        if not self.is_normalised:
            nn.init.zeros_(conv.weight)
        return conv

    def last_norm(self, channels: int) -> nn.Module:
        """Return the normalisation that ends a residual branch: of scale 0 when branches shall start at zero."""
        norm = self.norm(channels)
        if self.zero_init_residual:
            nn.init.zeros_(norm.get_parameter("weight"))
        return norm


def build_layers(norm: NormName, *, zero_init_residual: bool = False) -> Layers:
    """Return the normalisation called `norm` and its convolutions."""
    assert not (zero_init_residual and norm == "none"), "the schema refuses it: such branches start at zero anyway"
    return Layers(build_norm(norm), norm != "none", zero_init_residual)


def scaled(channels: int, width: float) -> int:
    """Return `channels` times `width`, rounded, and one at least."""
    return max(1, round(channels * width))
