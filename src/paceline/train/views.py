"""Views of an image in evaluation: the image alone, or with test-time augmentation."""

from typing import Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional


class EvalViews(Protocol):
    """Compute logits from images."""

    def __call__(self, model: nn.Module, images: Tensor) -> Tensor:
        """Return float [N, num_classes] for normalised images [N, C, H, W]."""
        ...


class SingleView:
    """Evaluate each image once."""

    def __call__(self, model: nn.Module, images: Tensor) -> Tensor:
        """Return the model's logits, float [N, num_classes]."""
        logits: Tensor = model(images)
        return logits


class FlipViews:
    """Average the logits of each image and its horizontal flip."""

    def __call__(self, model: nn.Module, images: Tensor) -> Tensor:
        """Return the mean of both logits, float64 [N, num_classes], so that 16-bit logits are not rounded again."""
        both: Tensor = torch.stack([model(images), model(images.flip(3))])
        return both.double().mean(dim=0)


class ShiftViews:
    """Average over each image, its flip, and both shifted by one pixel up-left and down-right.

    The unshifted pair has weight 1/2, the others 1/4 each, as in airbench (Jordan 2024, arXiv 2404.00498, section 3.6).
    Borders are reflected.
    """

    def __call__(self, model: nn.Module, images: Tensor) -> Tensor:
        """Return the weighted mean, float64 [N, num_classes]."""
        height, width = images.shape[-2:]
        padded = functional.pad(images, (1, 1, 1, 1), mode="reflect")
        views = FlipViews()
        shifted = [
            padded[..., by : by + height, by : by + width].contiguous(memory_format=_memory_format(images))
            for by in (0, 2)
        ]
        return 0.5 * views(model, images) + 0.25 * sum(views(model, each) for each in shifted)


def _memory_format(images: Tensor) -> torch.memory_format:
    is_last = images.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if is_last else torch.contiguous_format


def build_eval_views(number: Literal[1, 2, 6]) -> EvalViews:
    """Return the views of `data.eval_views`."""
    match number:
        case 1:
            return SingleView()
        case 2:
            return FlipViews()
        case 6:
            return ShiftViews()
