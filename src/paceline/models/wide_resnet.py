"""The wide residual network of distributed-training courses: WRN-16-10, of pre-activation blocks.

Zagoruyko and Komodakis 2016, Wide Residual Networks (arXiv 1605.07146), without dropout.
"""

from torch import Tensor, nn
from torch.nn import functional as F

from paceline.models.drop_path import build_drop_path, linear_rates
from paceline.models.norms import Layers, NormName, build_layers, scaled

STEM_CHANNELS = 16
GROUP_CHANNELS = (160, 320, 640)
BLOCKS_PER_GROUP = 2


class PreActivationBlock(nn.Module):
    """Add two 3x3 convolutions, each after normalisation and ReLU, to the input.

    [N, in_channels, H, W] to [N, out_channels, H / stride, W / stride]. Where shapes differ, the shortcut is
    a 1x1 convolution of the activated input, as in the authors' code.
    """

    def __init__(
        self, layers: Layers, in_channels: int, out_channels: int, stride: int, drop_path: float = 0.0
    ) -> None:
        super().__init__()
        self.norm1 = layers.norm(in_channels)
        self.conv1 = layers.conv(in_channels, out_channels, 3, stride)
        self.norm2 = layers.norm(out_channels)
        self.conv2 = layers.last_conv(out_channels, out_channels, 3)
        if layers.zero_init_residual:
            # This branch ends in a convolution. Its last norm cannot start it at zero: a ReLU that sees only zeros
            # passes no gradient, and the branch would stay there.
            nn.init.zeros_(self.conv2.weight)
        is_same_shape = stride == 1 and in_channels == out_channels
        self.projection = None if is_same_shape else layers.conv(in_channels, out_channels, 1, stride)
        self.drop_path = build_drop_path(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output in the input's dtype."""
        # Not in place: without normalisation the first ReLU would overwrite what the shortcut carries.
        activated = F.relu(self.norm1(x))
        shortcut = x if self.projection is None else self.projection(activated)
        residual: Tensor = self.drop_path(self.conv2(F.relu(self.norm2(self.conv1(activated)))))
        return shortcut + residual


class WideResNet(nn.Module):
    """A stem of 16 channels and three groups of 160, 320 and 640 times `width`; the last two halve the image.

    Maps images, float [N, channels, H, W], to logits, float [N, num_classes]. The classifier keeps torch's
    initialisation, U(-1, 1) / sqrt(features).
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
    ) -> None:
        super().__init__()
        layers = build_layers(norm, zero_init_residual=zero_init_residual)
        rates = iter(linear_rates(drop_path, len(GROUP_CHANNELS) * BLOCKS_PER_GROUP))
        self.stem = layers.conv(channels, STEM_CHANNELS, 3)
        self.groups = nn.Sequential()
        num_features = STEM_CHANNELS
        for group, group_channels in enumerate(GROUP_CHANNELS):
            blocks = nn.Sequential()
            for index in range(BLOCKS_PER_GROUP):
                stride = 2 if group > 0 and index == 0 else 1
                out_channels = scaled(group_channels, width)
                blocks.append(PreActivationBlock(layers, num_features, out_channels, stride, next(rates)))
                num_features = out_channels
            self.groups.append(blocks)
        self.norm = layers.norm(num_features)
        self.classifier = nn.Linear(num_features, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of `images`."""
        features = F.relu(self.norm(self.groups(self.stem(images))))
        # A mean and not AdaptiveAvgPool2d, whose backward is not deterministic on CUDA.
        logits: Tensor = self.classifier(features.mean(dim=(2, 3)))
        return logits
