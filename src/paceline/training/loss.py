"""Training loss: cross-entropy with label smoothing and class weights."""

from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from paceline.core.dataset import Source
from paceline.core.errors import RecipeError, suggest_similar
from paceline.core.results import printable_class_name
from paceline.data.sources.fingerprint import get_labels
from paceline.recipe.schema.base import Off
from paceline.recipe.schema.train import Train


def compute_class_weights(
    setting: Off | Literal["balanced"] | dict[str, float], source: Source
) -> NDArray[np.float64] | None:
    """Return class weights float64 [C] with a mean of 1 over the images of `source`, None for `off`.

    `balanced` is scikit-learn's N / (C n_c) for N images, n_c of them in class c, and C non-empty classes; an empty
    class has weight 1. Raise `RecipeError` for unknown classes, or if labels cannot be read without images.
    """
    if setting == "off":
        return None
    labels = get_labels(source)
    if labels is None:
        raise RecipeError(
            f"train.class_weights: {source.info.name} has no labels apart from its images, so they cannot be counted "
            f"before training (set train.class_weights=off)"
        )
    names = source.info.class_names
    counts = np.bincount(labels, minlength=len(names))
    if setting == "balanced":
        weights = np.where(counts > 0, len(labels) / ((counts > 0).sum() * np.maximum(counts, 1)), 1.0)
        return np.asarray(weights, dtype=np.float64)
    unknown = [name for name in setting if name not in names]
    if unknown:
        some = ", ".join(printable_class_name(name) for name in names[:5])
        hint = suggest_similar(unknown[0], names) or f" (name some of {some}{', ...' if len(names) > 5 else ''})"
        raise RecipeError(f"train.class_weights: {unknown[0]!r} is not a class of the dataset{hint}")
    given = np.array([setting.get(name, 1.0) for name in names], dtype=np.float64)
    scaled: NDArray[np.float64] = given * (len(labels) / (given @ counts))
    return scaled


def describe_class_weights(weights: NDArray[np.float64], class_names: tuple[str, ...]) -> str:
    """Return the smallest and largest weight as text, such as `train.class_weights: from 0.444 (cat) to ...`."""
    least, most = int(weights.argmin()), int(weights.argmax())
    ends = (f"{weights[at]:.3g} ({printable_class_name(class_names[at])})" for at in (least, most))
    return f"train.class_weights: from {' to '.join(ends)}, with a mean of 1 over the training images"


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
    """Return the training loss, and a note on its class weights. Raise `RecipeError` as `compute_class_weights`."""
    weights = compute_class_weights(section.class_weights, source)
    if weights is None:
        return CrossEntropy(section.label_smoothing), ""
    on_device = torch.from_numpy(weights).to(device)
    return CrossEntropy(section.label_smoothing, on_device), describe_class_weights(weights, source.info.class_names)
