"""Training loss."""

import torch
from torch import Tensor
from torch.nn import functional

from paceline.core.dataset import Source
from paceline.recipe.schema.train import Train
from paceline.train.class_weights import compute_class_weights, describe_class_weights


class CrossEntropy(torch.nn.Module):
    """Mean cross-entropy over a batch, computed in float32 or wider.

    `label_smoothing` distributes that probability evenly over all classes (Szegedy et al. 2016, arXiv 1512.00567).
    `weights` [num_classes] multiply an image's loss by the weight of its label; with mixed or smoothed labels, each
    class's share of the target has that class's weight.
    """

    # Divided by the number of images, not by the sum of their weights as in torch: the loss of a batch is then the mean
    # over ranks and micro-batches, whatever classes each has.

    def __init__(self, label_smoothing: float, weights: Tensor | None = None) -> None:
        super().__init__()
        self._label_smoothing = label_smoothing
        self._weights = weights

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the loss [] of logits [N, C] for `targets`: classes int64 [N], or probabilities float [N, C]."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if targets.is_floating_point():
            targets = targets.to(logits.dtype)
        if self._weights is None:
            return functional.cross_entropy(logits, targets, label_smoothing=self._label_smoothing)
        weights = self._weights.to(logits.dtype)
        smoothing = self._label_smoothing
        return functional.cross_entropy(logits, targets, weights, reduction="none", label_smoothing=smoothing).mean()


def build_loss(section: Train, source: Source, device: torch.device) -> tuple[CrossEntropy, str]:
    """Return the training loss, and a note on its class weights (empty without any).

    Raise `RecipeError` for weights of unknown classes, and if the labels cannot be counted.
    """
    weights = compute_class_weights(section.class_weights, source)
    if weights is None:
        return CrossEntropy(section.label_smoothing), ""
    on_device = torch.from_numpy(weights).to(device)
    return CrossEntropy(section.label_smoothing, on_device), describe_class_weights(weights, source.info.class_names)
