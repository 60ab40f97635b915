"""ResNets for small images: a stem of stride 1 without pooling.

He et al. 2015, Deep Residual Learning for Image Recognition (arXiv 1512.03385), with torchvision's blocks.
"""

from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from paceline.models.layers import (
    LayerFactory,
    NormName,
    append_drop_path,
    build_layer_factory,
    linear_drop_rates,
    scale_channels,
)

STEM_CHANNELS = 64
STAGE_CHANNELS = (64, 128, 256, 512)
BOTTLENECK_EXPANSION = 4


class ResidualBlock(nn.Module):
    """Compute relu(branch(x) + shortcut(x)): [N, C, H, W] to [N, out_channels, H / stride, W / stride]."""

    def __init__(self, branch: nn.Module, shortcut: nn.Module, out_channels: int) -> None:
        super().__init__()
        self.branch = branch
        self.shortcut = shortcut
        self.out_channels = out_channels

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output in the input's dtype."""
        return F.relu(self.branch(x) + self.shortcut(x), inplace=True)


BlockBuilder = Callable[[LayerFactory, int, int, int, float], ResidualBlock]


def build_basic_block(
    layers: LayerFactory, in_channels: int, channels: int, stride: int, drop_path: float = 0.0
) -> ResidualBlock:
    """Return a block of two 3x3 convolutions, for 18 and 34 layers."""
    branch = nn.Sequential(
        layers.conv(in_channels, channels, 3, stride),
        layers.norm(channels),
        nn.ReLU(inplace=True),
        layers.last_conv(channels, channels, 3),
        layers.last_norm(channels),
    )
    return ResidualBlock(
        append_drop_path(branch, drop_path), _build_shortcut(layers, in_channels, channels, stride), channels
    )


def build_bottleneck_block(
    layers: LayerFactory, in_channels: int, channels: int, stride: int, drop_path: float = 0.0
) -> ResidualBlock:
    """Return a block of 1x1, 3x3 and 1x1 convolutions with `4 * channels` outputs, for 50 layers."""
    out_channels = BOTTLENECK_EXPANSION * channels
    branch = nn.Sequential(
        layers.conv(in_channels, channels, 1),
        layers.norm(channels),
        nn.ReLU(inplace=True),
        layers.conv(channels, channels, 3, stride),  # as in torchvision; He et al. have the stride in the 1x1
        layers.norm(channels),
        nn.ReLU(inplace=True),
        layers.last_conv(channels, out_channels, 1),
        layers.last_norm(out_channels),
    )
    return ResidualBlock(
        append_drop_path(branch, drop_path), _build_shortcut(layers, in_channels, out_channels, stride), out_channels
    )


def _build_shortcut(layers: LayerFactory, in_channels: int, out_channels: int, stride: int) -> nn.Module:
    if stride == 1 and in_channels == out_channels:
        return nn.Identity()
    return nn.Sequential(layers.conv(in_channels, out_channels, 1, stride), layers.norm(out_channels))


class ResNet(nn.Module):
    """A ResNet of four stages; each but the first halves the image.

    Maps images, float [N, channels, H, W], to logits, float [N, num_classes]. `depths` are the blocks per stage.
    """

    def __init__(
        self,
        *,
        num_classes: int,
        channels: int,
        width: float,
        norm: NormName,
        zero_init_residual: bool,
        drop_path: float,
        make_block: BlockBuilder,
        depths: Sequence[int],
        stem_kernel: int,
    ) -> None:
        super().__init__()
        layers = build_layer_factory(norm, zero_init_residual=zero_init_residual)
        rates = iter(linear_drop_rates(drop_path, sum(depths)))
        num_features = scale_channels(STEM_CHANNELS, width)
        self.stem = nn.Sequential(
            layers.conv(channels, num_features, stem_kernel), layers.norm(num_features), nn.ReLU(inplace=True)
        )
        self.stages = nn.Sequential()
        for stage, (stage_channels, depth) in enumerate(zip(STAGE_CHANNELS, depths, strict=True)):
            blocks = nn.Sequential()
            for index in range(depth):
                stride = 2 if stage > 0 and index == 0 else 1
                block = make_block(layers, num_features, scale_channels(stage_channels, width), stride, next(rates))
                blocks.append(block)
                num_features = block.out_channels
            self.stages.append(blocks)
        self.classifier = nn.Linear(num_features, num_classes)  # torch's initialization, U(-1, 1) / sqrt(features)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of `images`."""
        features = self.stages(self.stem(images))
        # Not AdaptiveAvgPool2d: its backward pass is not deterministic on CUDA.
        logits: Tensor = self.classifier(features.mean(dim=(2, 3)))
        return logits
