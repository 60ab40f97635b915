"""The airbench networks, which reach a given accuracy on CIFAR-10 in the least time."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.models.layers import (
    LayerFactory,
    NormLayer,
    NormName,
    Whitening,
    build_drop_path,
    build_norm,
    linear_drop_rates,
    scale_channels,
)

BATCH_NORM_EPS = 1e-12
LOGIT_SCALE = 1 / 9


class SpeedNet(nn.Module):
    """A whitening convolution, three blocks of `block_channels` times `width`, and global max-pooling.

    Maps images, float [N, channels, H, W] with H and W of 9 at least, to logits, float [N, num_classes]. Jordan 2024,
    94% on CIFAR-10 in 3.29 Seconds on a Single GPU (arXiv 2404.00498), with constants from the author's code
    (github.com/KellerJordan/cifar10-airbench, legacy/airbench94.py, 95 and 96). Norms have a fixed scale of 1 and a
    learned bias. Optimizer, augmentation and lookahead are set by the recipe.
    """

    def __init__(
        self,
        *,
        num_classes: int,
        channels: int,
        width: float,
        norm: NormName,
        block_channels: Sequence[int],
        batch_norm_momentum: float,
        is_residual: bool,
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        layers = _build_layer_factory(norm, batch_norm_momentum)
        self.whitening = Whitening(channels)
        self.blocks = nn.Sequential()
        num_features = self.whitening.out_channels
        for out_channels, rate in zip(block_channels, linear_drop_rates(drop_path, len(block_channels)), strict=True):
            self.blocks.append(
                _build_block(layers, num_features, scale_channels(out_channels, width), rate, is_residual=is_residual)
            )
            num_features = scale_channels(out_channels, width)
        self.classifier = nn.Linear(num_features, num_classes, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of `images`, scaled by 1/9."""
        features = self.blocks(F.gelu(self.whitening(images)))
        # The paper max-pools by 3, which is global at 28 to 33 px; here it is global at every size.
        logits: Tensor = self.classifier(global_max_pool(features))
        return logits * LOGIT_SCALE


def global_max_pool(features: Tensor) -> Tensor:
    """Return the largest value of each channel: [N, C, H, W] to [N, C]."""
    # max_pool2d remembers the index of the maximum. The backward pass of `amax` searches for it again; compiled code
    # recomputes the features without rounding them to 16 bits, finds no equal value, and 0 / 0 is NaN.
    return F.max_pool2d(features, features.shape[2:]).flatten(1)


class ResidualPair(nn.Module):
    """Compute gelu(x + branch(x)), a branch of two convolutions: [N, C, H, W] to the same shape."""

    def __init__(self, layers: LayerFactory, channels: int, drop_path: float) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            _build_conv(layers, channels, channels),
            layers.norm(channels),
            nn.GELU(),
            _build_conv(layers, channels, channels),
            layers.norm(channels),
        )
        self.drop_path = build_drop_path(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        """Return the pair's output in the input's dtype."""
        return F.gelu(x + self.drop_path(self.branch(x)))


def _build_block(
    layers: LayerFactory, in_channels: int, channels: int, drop_path: float, *, is_residual: bool
) -> nn.Sequential:
    """Return a block that halves the image, then has a convolution or a residual pair."""
    block = nn.Sequential(_build_conv(layers, in_channels, channels), nn.MaxPool2d(2), layers.norm(channels), nn.GELU())
    if is_residual:
        return block.append(ResidualPair(layers, channels, drop_path))
    return block.extend([_build_conv(layers, channels, channels), layers.norm(channels), nn.GELU()])


def _build_conv(layers: LayerFactory, in_channels: int, out_channels: int) -> nn.Conv2d:
    conv = layers.conv(in_channels, out_channels, 3)
    if layers.has_norm:
        # A norm hides the scale of the filters from the output but not from the effective step size, so use the
        # published scale, torch's default.
        conv.reset_parameters()
    # The first filters of each 3x3 convolution start as the identity on its inputs (section 3.3).
    with torch.no_grad():
        nn.init.dirac_(conv.weight[:in_channels])
    return conv


def _build_layer_factory(norm: NormName, batch_norm_momentum: float) -> LayerFactory:
    is_batch = norm in ("batch", "sync_batch")
    batch_norm = partial(nn.BatchNorm2d, eps=BATCH_NORM_EPS, momentum=batch_norm_momentum)
    return LayerFactory(_fix_norm_scale(batch_norm if is_batch else build_norm(norm)), has_norm=norm != "none")


def _fix_norm_scale(norm: NormLayer) -> NormLayer:
    """Return a builder of the same norm with its scale fixed at 1, if it has one."""

    def build(channels: int) -> nn.Module:
        module = norm(channels)
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name != "weight")
        return module

    return build
