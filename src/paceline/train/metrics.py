"""Evaluation metrics as counts on the device.

Counts of disjoint subsets add up to those of the whole set, so the value over all ranks is that of one pass over all
images.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from paceline.core.class_table import ClassCount, ClassTable, printable_class_name
from paceline.core.results import EvalResult

NUM_BINS = 15
"""Bins of the calibration error, as in Guo et al. 2017 (arXiv 1706.04599)."""
MAX_CONFUSION_CLASSES = 1000
"""Limit for a confusion matrix, quadratic in size: 8 MB on the device and 2 MB as a file at 1000 classes."""


class Predictions(NamedTuple):
    """Predictions for N images with `labels` int64 [N].

    `hits` bool [N, min(5, num_classes)]: whether the first, second, ... prediction is the label. `predicted` int64 [N]
    is the first, `confidence` float64 [N] its probability, and `losses` float64 [N] the cross-entropy of the label.
    """

    labels: Tensor
    hits: Tensor
    predicted: Tensor
    confidence: Tensor
    losses: Tensor


def predict_batch(logits: Tensor, labels: Tensor) -> Predictions:
    """Return the predictions of logits float [N, num_classes] for labels int64 [N] on the same device.

    Logits are compared and summed in float64. The prediction is the class that `topk` ranks first.
    """
    log_probabilities = logits.double().log_softmax(dim=1)
    best = log_probabilities.topk(min(5, logits.shape[1]), dim=1).indices
    return Predictions(
        labels=labels,
        hits=best == labels[:, None],
        predicted=best[:, 0],
        confidence=log_probabilities.gather(1, best[:, :1])[:, 0].exp(),
        losses=-log_probabilities.gather(1, labels[:, None])[:, 0],
    )


@dataclass(frozen=True)
class EvalCounts:
    """Counts of the images so far, on the device; adding a batch never synchronizes.

    `scores` float64 [4]: images, top-1 correct, top-5 correct, summed cross-entropy. `bins` float64 [3, 15] by
    confidence: images, summed confidence, correct. `classes` int64 [2, num_classes] by true class: images, correct.
    `confusion` int64 [num_classes, num_classes]: images by true class (rows) and predicted class (columns), or [0, 0]
    for more than `MAX_CONFUSION_CLASSES`.
    """

    scores: Tensor
    bins: Tensor
    classes: Tensor
    confusion: Tensor

    @classmethod
    def zeros(cls, num_classes: int, device: torch.device) -> Self:
        """Return the counts of no images."""
        side = num_classes if num_classes <= MAX_CONFUSION_CLASSES else 0
        return cls(
            scores=torch.zeros(4, dtype=torch.float64, device=device),
            bins=torch.zeros(3, NUM_BINS, dtype=torch.float64, device=device),
            classes=torch.zeros(2, num_classes, dtype=torch.int64, device=device),
            confusion=torch.zeros(side, side, dtype=torch.int64, device=device),
        )

    def add(self, predictions: Predictions) -> None:
        """Count a batch."""
        labels, hits, predicted, confidence, losses = predictions
        correct, ones = hits[:, 0].double(), torch.ones_like(losses)
        self.scores.add_(torch.stack([ones, correct, hits.sum(dim=1).double(), losses]).sum(dim=1))
        self.bins.add_(_sum_by_bin(confidence, torch.stack([ones, confidence, correct])))
        self.classes[0].index_add_(0, labels, torch.ones_like(labels))
        self.classes[1].index_add_(0, labels, hits[:, 0].long())
        if self.confusion.numel():
            cells = labels * self.classes.shape[1] + predicted
            self.confusion.view(-1).index_add_(0, cells, torch.ones_like(labels))

    def reduce(self, reduce: Callable[[Tensor], Tensor]) -> "EvalCounts":
        """Return the counts with `reduce`, such as a sum over ranks, applied to each tensor."""
        return EvalCounts(reduce(self.scores), reduce(self.bins), reduce(self.classes), reduce(self.confusion))

    @property
    def images(self) -> int:
        """Number of images counted. Waits for the device."""
        return int(self.scores[0].item())

    def to_result(self) -> EvalResult:
        """Return the metrics; at least one image must have been counted."""
        images, top1, top5, loss = self.scores.tolist()
        return EvalResult(
            images=int(images),
            top1=top1 / images,
            top5=top5 / images,
            loss=loss / images,
            ece=expected_calibration_error(self.bins),
            mean_class_accuracy=mean_class_accuracy(self.classes),
        )

    def to_class_table(self, names: Sequence[str]) -> ClassTable:
        """Return the per-class counts for classes called `names`."""
        rows = zip(names, *self.classes.tolist(), strict=True)
        return ClassTable(
            classes=tuple(ClassCount(printable_class_name(name), images, correct) for name, images, correct in rows),
            confusion=tuple(map(tuple, self.confusion.tolist())),
        )


def expected_calibration_error(bins: Tensor) -> float:
    """Return the mean distance between accuracy and confidence per bin, weighted by images.

    `bins` is [3, num_bins]: images, summed confidence, correct. Guo et al. 2017 (arXiv 1706.04599), equation 3.
    """
    images, confidence, correct = bins
    return float((correct - confidence).abs().sum() / images.sum())


def mean_class_accuracy(classes: Tensor) -> float:
    """Return the mean accuracy of the non-empty classes; `classes` is [2, num_classes]: images, correct.

    Also called balanced accuracy (Brodersen et al. 2010, doi 10.1109/ICPR.2010.764).
    """
    images, correct = classes[:, classes[0] > 0].double()
    return float((correct / images).mean())


def _sum_by_bin(confidence: Tensor, values: Tensor) -> Tensor:
    """Sum `values` [K, N] by the bin of `confidence` [N] to [K, NUM_BINS]; bin m of M is (m / M, (m + 1) / M]."""
    # A masked sum, not a scatter-add: its order, and so its rounding, would vary between runs on GPUs.
    bins = (confidence * NUM_BINS).ceil().sub(1).clamp(0, NUM_BINS - 1)
    is_in_bin = bins[:, None] == torch.arange(NUM_BINS, device=confidence.device)
    return (values[:, :, None] * is_in_bin).sum(dim=1)
