"""Train your own model with paceline: 93 % of scikit-learn's digits, in seconds on a CPU.

    python examples/own_model.py
    torchrun --nproc-per-node 2 examples/own_model.py
    PYTHONPATH=examples paceline train digits model.name=own_model:Pyramid model.args.width=64

paceline calls the class with `num_classes`, `in_channels` and `model.args`; the model maps normalized images to logits.
"""

import os
from itertools import pairwise

from torch import Tensor, nn

import paceline


class Pyramid(nn.Module):
    """Classify images by `depth` layers that halve the image and double the channels."""

    def __init__(self, num_classes: int, in_channels: int, width: int = 16, depth: int = 2) -> None:
        super().__init__()
        channels = [in_channels, *(width * 2**layer for layer in range(depth))]
        self.layers = nn.Sequential(*(halving(*pair) for pair in pairwise(channels)), nn.AdaptiveAvgPool2d(2))
        self.classify = nn.Linear(4 * channels[-1], num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [N, num_classes] of float images [N, C, H, W]."""
        return self.classify(self.layers(images).flatten(1))


def halving(num_in: int, num_out: int) -> nn.Module:
    """Return a convolution of stride 2, BatchNorm and ReLU."""
    return nn.Sequential(nn.Conv2d(num_in, num_out, 3, stride=2, padding=1), nn.BatchNorm2d(num_out), nn.ReLU())


def main() -> None:
    """Train the model on the preset `digits` for a few epochs, with overrides as on the command line."""
    result = paceline.train("digits", "train.epochs=6", "model.args.width=32", model=Pyramid)
    if os.environ.get("RANK", "0") == "0":  # each rank has the same result
        print(f"top1 {result.eval.top1:.1%} of {result.eval.images} images it was not trained on")


if __name__ == "__main__":
    main()
