"""What a step makes small."""

import torch
from torch import Tensor
from torch.nn import functional

from paceline.core.dataset import Source
from paceline.recipe.schema.train import Train
from paceline.train.class_weights import class_weights, weights_told


class CrossEntropy(torch.nn.Module):
    """Mean cross-entropy over a batch, in float32 at least, whatever the format of the logits.

    `label_smoothing` spreads that probability evenly over all classes (Szegedy et al. 2016, arXiv 1512.00567).
    With `weights` [num_classes], class by class what its share of an image's loss is multiplied by: an image counts
    by the weight of its label, and, where labels are mixed or smoothed, each share of its target by the weight of that
    share's class. The sum is divided by the number of images and not, as in torch, by the sum of their weights: the
    loss of a batch is then the mean of those of its parts, on ranks and in micro-batches, whatever classes are in each.
    """

    def __init__(self, label_smoothing: float, weights: Tensor | None = None) -> None:
        super().__init__()
        self._label_smoothing = label_smoothing
        self._weights = weights

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the loss [] of logits [N, C] for `targets`: classes int64 [N], or probabilities float [N, C]."""
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if targets.is_floating_point():
            targets = targets.to(wide.dtype)
        if self._weights is None:
            return functional.cross_entropy(wide, targets, label_smoothing=self._label_smoothing)
        weights = self._weights.to(wide.dtype)
        smoothing = self._label_smoothing
        return functional.cross_entropy(wide, targets, weights, reduction="none", label_smoothing=smoothing).mean()


def build_loss(section: Train, source: Source, device: torch.device) -> tuple[CrossEntropy, str]:
    """Return the loss of training on the split `source`, and a sentence on its weights, empty where it has none.

    Raise `RecipeError` for weights of classes that the split does not have, and where its labels cannot be counted.
    """
    weights = class_weights(section.class_weights, source)
    if weights is None:
        return CrossEntropy(section.label_smoothing), ""
    on_device = torch.from_numpy(weights).to(device)
    return CrossEntropy(section.label_smoothing, on_device), weights_told(weights, source.info.class_names)
