"""How a model is shown an image in evaluation: as it is, or as it is and mirrored."""

from typing import Protocol

import torch
from torch import Tensor, nn


class Views(Protocol):
    """Turn images into logits."""

    def __call__(self, model: nn.Module, images: Tensor) -> Tensor:
        """Return float [N, num_classes] for normalised images [N, C, H, W]."""
        ...


class AsIs:
    """Show each image once."""

    def __call__(self, model: nn.Module, images: Tensor) -> Tensor:
        """Return the model's logits."""
        logits: Tensor = model(images)
        return logits


class Mirrored:
    """Show each image and its mirror image (test-time augmentation); the logits are the mean of both."""

    def __call__(self, model: nn.Module, images: Tensor) -> Tensor:
        """Return the mean, float64, so that 16-bit logits are not rounded again."""
        both: Tensor = torch.stack([model(images), model(images.flip(3))])
        return both.double().mean(dim=0)


def build_views(*, eval_flip: bool) -> Views:
    """Return the views that `data.eval_flip` asks for."""
    return Mirrored() if eval_flip else AsIs()
