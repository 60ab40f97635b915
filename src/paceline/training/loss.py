"""Training losses with label smoothing and class weights: cross-entropy, binary cross-entropy, focal, and plugins."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from paceline.core.dataset import Source
from paceline.core.errors import RecipeError, suggest_similar
from paceline.core.results import printable_class_name
from paceline.core.units import count
from paceline.data.sources.fingerprint import get_labels
from paceline.recipe.plugins import LOSS, PluginRef, unwrap_partial
from paceline.recipe.schema.base import Off
from paceline.recipe.schema.train import BceLoss, CrossEntropyLoss, FocalLoss, OwnLoss, Train


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
    counts = source.info.count_classes(labels)
    if setting == "balanced":
        divisors = np.where(counts > 0, counts, 1)
        weights = np.where(counts > 0, len(labels) / ((counts > 0).sum() * divisors), 1.0)
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


ImageLosses = Callable[[Tensor, Tensor], Tensor]
"""Return the losses [N] of logits float [N, C] for targets: classes int64 [N], or probabilities float [N, C]."""


class MeanLoss(torch.nn.Module):
    """Mean over a batch of the losses of its images, computed in float32 or wider.

    `weights` [C] multiply an image's loss by the weight of its label, or by the mean weight of its mixed labels.
    """

    def __init__(self, losses: ImageLosses, weights: Tensor | None = None) -> None:
        super().__init__()
        self._losses = losses
        self._weights = weights

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the loss [] of logits [N, C] for `targets`: classes int64 [N], or probabilities float [N, C]."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if targets.is_floating_point():
            targets = targets.to(logits.dtype)
        # Under autocast a matrix product in your own loss would be rounded to 16 bits.
        with torch.autocast(logits.device.type, enabled=False):
            losses = self._losses(logits, targets)
            if self._weights is not None:
                weights = self._weights.to(logits.dtype)
                # Not a matrix product, which TF32 would round.
                mixed = targets.is_floating_point()
                losses = losses * ((targets * weights).sum(dim=1) if mixed else weights[targets])
            return losses.mean()


def to_probabilities(targets: Tensor, logits: Tensor, smoothing: float) -> Tensor:
    """Return `targets` as probabilities [N, C], of which `smoothing` is spread evenly over all classes."""
    num_classes = logits.shape[1]
    if not targets.is_floating_point():
        targets = functional.one_hot(targets, num_classes).to(logits.dtype)
    return targets * (1 - smoothing) + smoothing / num_classes if smoothing else targets


@dataclass(frozen=True)
class BinaryCrossEntropy:
    """Losses [N] of each image: the mean over classes of their binary cross-entropy, or its sum.

    As timm's `BinaryCrossEntropy`: targets above `threshold` become 1 and others 0, after smoothing.
    """

    smoothing: float
    sum_classes: bool
    threshold: float | None

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the losses [N] of logits [N, C]."""
        targets = to_probabilities(targets, logits, self.smoothing)
        if self.threshold is not None:
            targets = (targets > self.threshold).to(logits.dtype)
        losses = functional.binary_cross_entropy_with_logits(logits, targets, reduction="none")
        return losses.sum(dim=1) if self.sum_classes else losses.mean(dim=1)


@dataclass(frozen=True)
class SoftmaxFocal:
    """Losses [N] of each image: sum over classes of -w t (1 - p)^gamma log p, for targets t and probabilities p.

    Lin et al. 2017 (arXiv 1708.02002), equation 5, with `weights` w [C] as alpha. A gamma of 0 gives `CrossEntropy`.
    """

    smoothing: float
    gamma: float
    weights: Tensor | None

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the losses [N] of logits [N, C]."""
        targets = to_probabilities(targets, logits, self.smoothing)
        if self.weights is not None:
            targets = targets * self.weights.to(logits.dtype)
        log_probabilities = logits.log_softmax(dim=1)
        losses = targets * _focal_factor(-log_probabilities.expm1(), self.gamma) * -log_probabilities
        return losses.sum(dim=1)


@dataclass(frozen=True)
class SigmoidFocal:
    """Losses [N] of each image: the sum over classes of torchvision's `sigmoid_focal_loss`, without alpha."""

    smoothing: float
    gamma: float

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the losses [N] of logits [N, C]."""
        targets = to_probabilities(targets, logits, self.smoothing)
        probabilities = logits.sigmoid()
        losses = functional.binary_cross_entropy_with_logits(logits, targets, reduction="none")
        # 1 - p_t, for p_t = p t + (1 - p)(1 - t)
        wrong = probabilities + targets - 2 * probabilities * targets
        return (losses * _focal_factor(wrong, self.gamma)).sum(dim=1)


def _focal_factor(wrong: Tensor, gamma: float) -> Tensor:
    # At 0 the gradient of a power below 1 is infinite, and NaN after multiplication by 0.
    return wrong.clamp_min(torch.finfo(wrong.dtype).tiny).pow(gamma)


@dataclass(frozen=True)
class PluginLoss:
    """Losses [N] of each image by your own code. Raise `RecipeError` if it raises, or returns another shape."""

    plugin: PluginRef
    losses: Callable[..., Tensor]

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the losses [N] of logits [N, C]."""
        with self.plugin.reporting():
            losses = self.losses(logits, targets)
        shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        if shape != (len(logits),):
            wanted = f"not a loss of each of {count(len(logits), 'image')}"
            raise self.plugin.error(f"returned {shape}, {wanted} (use reduction='none')")
        return losses


def _load_plugin(section: OwnLoss, device: torch.device) -> PluginLoss:
    plugin = PluginRef("train.loss", section.name, section.args, LOSS)
    function = plugin.load()
    losses = plugin.make() if isinstance(function, type) else partial(function, **section.args)
    module = unwrap_partial(losses)  # of a class, or an object of a module
    if isinstance(module, torch.nn.Module):
        if any(True for _ in module.parameters()):
            raise plugin.error(
                "has parameters, which would not be trained (use buffers, or make them part of the model)"
            )
        module.to(device)
    return PluginLoss(plugin, losses)


def _check_threshold(threshold: float, smoothing: float, num_classes: int) -> None:
    """Raise `RecipeError` if with `smoothing` no target, or every one, is above `threshold`."""
    low, fix = smoothing / num_classes, "set train.label_smoothing=0"
    if not low <= threshold < 1 - smoothing + low:
        every = f"makes every target {int(threshold < low)}, as train.label_smoothing {smoothing:g} over"
        classes = f"{count(num_classes, 'class', 'classes')} makes them {low:g} to {1 - smoothing + low:g}"
        raise RecipeError(f"train.loss.target_threshold: {threshold:g} {every} {classes} ({fix})")


def build_loss(section: Train, source: Source, device: torch.device) -> tuple[torch.nn.Module, str]:
    """Return the training loss, and a note on its class weights.

    Raise `RecipeError` as `compute_class_weights`, and for a plugin that cannot be used.
    """
    class_weights, note, weights = compute_class_weights(section.class_weights, source), "", None
    if class_weights is not None:
        note = describe_class_weights(class_weights, source.info.class_names)
        weights = torch.from_numpy(class_weights).to(device)
    smoothing = section.label_smoothing
    match section.loss:
        case CrossEntropyLoss():
            return CrossEntropy(smoothing, weights), note
        case BceLoss(sum_classes=sum_classes, target_threshold=threshold):
            if threshold != "off":
                _check_threshold(threshold, smoothing, len(source.info.class_names))
            losses = BinaryCrossEntropy(smoothing, sum_classes, None if threshold == "off" else threshold)
            return MeanLoss(losses, weights), note
        case FocalLoss(activation="softmax", gamma=gamma):
            return MeanLoss(SoftmaxFocal(smoothing, gamma, weights)), note
        case FocalLoss(gamma=gamma):
            return MeanLoss(SigmoidFocal(smoothing, gamma), weights), note
        case OwnLoss():
            return MeanLoss(_load_plugin(section.loss, device), weights), note
