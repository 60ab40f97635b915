"""The wide ResNet of NVIDIA's course on data parallelism.

As wide as WRN-16-10 (Zagoruyko and Komodakis 2016, arXiv 1605.07146), but built differently: norm and ReLU follow each
convolution, no activation follows a sum, max-pooling replaces strides, shortcuts have a bias, and dropout is 1 %. All
weights keep torch's default initialization. With one channel and ten classes it has 17,117,466 parameters.
"""

from torch import Tensor, nn
from torch.nn import functional as F

from paceline.models.layers import NormName, build_drop_path, build_norm, linear_drop_rates, scale_channels

STEM_CHANNELS = 16
GROUP_CHANNELS = (160, 320, 640)
BLOCKS_PER_GROUP = 2
DROPOUT = 0.01
POOLED_SIZE = 7


class WideBlock(nn.Module):
    """Compute branch(x) + shortcut(x): [N, in_channels, H, W] to [N, out_channels, H, W].

    The branch is convolution, norm, ReLU, dropout, convolution, norm, ReLU. The shortcut is a 1x1 convolution in the
    first block of a group, else the identity.
    """

    def __init__(self, norm: NormName, in_channels: int, out_channels: int, drop_path: float, *, is_first: bool):
        super().__init__()
        # Built in the course's order, so that a seed gives the same weights.
        self.shortcut = nn.Conv2d(in_channels, out_channels, 1) if is_first else nn.Identity()
        self.branch = nn.Sequential(
            _build_conv_norm_relu(norm, in_channels, out_channels),
            nn.Dropout(DROPOUT),
            _build_conv_norm_relu(norm, out_channels, out_channels),
        )
        self.drop_path = build_drop_path(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output in the input's dtype."""
        out: Tensor = self.drop_path(self.branch(x)) + self.shortcut(x)
        return out


class WideResNet(nn.Module):
    """A stem of 16 channels and three groups of two blocks, of 160, 320 and 640 channels times `width`.

    Maps images, float [N, channels, H, W] of at most 55 pixels per side, to logits, float [N, num_classes]. Each group
    but the last halves the image. The classifier sees the mean over the first 7x7 pixels, as from `AvgPool2d(7)`, or
    over all pixels if there are fewer.
    """

    def __init__(self, *, num_classes: int, channels: int, width: float, norm: NormName, drop_path: float) -> None:
        super().__init__()
        rates = iter(linear_drop_rates(drop_path, len(GROUP_CHANNELS) * BLOCKS_PER_GROUP))
        self.stem = _build_conv_norm_relu(norm, channels, STEM_CHANNELS)
        self.groups = nn.Sequential()
        num_features = STEM_CHANNELS
        for group_channels in GROUP_CHANNELS:
            blocks = nn.Sequential()
            for index in range(BLOCKS_PER_GROUP):
                out_channels = scale_channels(group_channels, width)
                blocks.append(WideBlock(norm, num_features, out_channels, next(rates), is_first=index == 0))
                num_features = out_channels
            if len(self.groups) + 1 < len(GROUP_CHANNELS):
                blocks.append(nn.MaxPool2d(2))
            self.groups.append(blocks)
        self.classifier = nn.Linear(num_features, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of `images`. Raise `ValueError` for images of more than 55 pixels per side."""
        features = self.groups(self.stem(images))
        height, width = features.shape[2:]
        if max(height, width) >= 2 * POOLED_SIZE:
            raise ValueError("images have more than 55 pixels a side (set a smaller data.image_size)")
        # Images of 28 px leave 7x7 pixels. Those of 32 px, as in the course's assessment, leave 8x8, of which the last
        # row and column are ignored. The course's model cannot take images below 28 px.
        pooled = F.avg_pool2d(features, (min(height, POOLED_SIZE), min(width, POOLED_SIZE)))
        logits: Tensor = self.classifier(pooled.flatten(1))
        return logits


def _build_conv_norm_relu(norm: NormName, in_channels: int, out_channels: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=norm == "none"),  # a norm has its own bias
        build_norm(norm)(out_channels),
        nn.ReLU(inplace=True),
    )
