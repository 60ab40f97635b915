"""How a model is shown an image in evaluation: as it is, or as it is and mirrored."""

from typing import Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional


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


class Shifted:
    """Show each image and its mirror image, both also shifted by a pixel up-left and down-right.

    Half of the weight is the unshifted pair's, a quarter each of the others', as in airbench (Jordan 2024, arXiv
    2404.00498, section 3.6). What a shift moves in is mirrored at the edge.
    """

    def __call__(self, model: nn.Module, images: Tensor) -> Tensor:
        """Return the weighted mean, float64."""
        height, width = images.shape[-2:]
        padded = functional.pad(images, (1, 1, 1, 1), mode="reflect")
        whole = Mirrored()
        shifted = [
            padded[..., by : by + height, by : by + width].contiguous(memory_format=_format(images)) for by in (0, 2)
        ]
        return 0.5 * whole(model, images) + 0.25 * sum(whole(model, each) for each in shifted)


def _format(images: Tensor) -> torch.memory_format:
    is_last = images.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if is_last else torch.contiguous_format


def build_views(number: Literal[1, 2, 6]) -> Views:
    """Return the views that `data.eval_views` asks for."""
    match number:
        case 1:
            return AsIs()
        case 2:
            return Mirrored()
        case 6:
            return Shifted()
