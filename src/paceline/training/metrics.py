"""Evaluation metrics as counts on the device, which add up over ranks, and the worst mistakes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from paceline.core.dataset import LABEL_SHARE
from paceline.core.results import (
    CalibrationBin,
    ClassCount,
    ClassTable,
    EvalResult,
    MisclassifiedImage,
    printable_class_name,
)

NUM_BINS = 15
"""Bins of the calibration error, as in Guo et al. 2017 (arXiv 1706.04599)."""
MAX_CONFUSION_CLASSES = 1000
"""Limit for a confusion matrix: 8 MB on the device and 2 MB as a file at 1000 classes."""
_COLUMNS = 5
_INDEX, _LABEL, _PREDICTED, _CONFIDENCE, _LOSS = range(_COLUMNS)
_EMPTY_LOSS = -torch.inf
"""Loss of an empty row."""


class Predictions(NamedTuple):
    """Predictions for N images with `labels` int64 [N].

    `hits` bool [N, min(K, num_classes)]: whether the first, second, ... K-th prediction is the label, for K of at
    least 5. `predicted` int64 [N] is the first, `confidence` float64 [N] its probability, and `losses` float64 [N]
    the cross-entropy of the label.
    """

    labels: Tensor
    hits: Tensor
    predicted: Tensor
    confidence: Tensor
    losses: Tensor


def predict_batch(logits: Tensor, labels: Tensor, num_best: int = 5, targets: Tensor | None = None) -> Predictions:
    """Return the `num_best` predictions of logits float [N, num_classes] for labels int64 [N] on the same device.

    With soft `targets` float [N, num_classes] the losses are the cross-entropy of these.
    """
    # float64, so that 16-bit logits give exact sums, and the prediction agrees with `topk` in case of ties.
    log_probabilities = logits.double().log_softmax(dim=1)
    best = log_probabilities.topk(min(5, logits.shape[1]), dim=1).indices
    hits = best == labels[:, None]
    if num_best > 5:
        hits = _extend_hits(hits, log_probabilities, labels, num_best)
    return Predictions(
        labels=labels,
        hits=hits,
        predicted=best[:, 0],
        confidence=log_probabilities.gather(1, best[:, :1])[:, 0].exp(),
        losses=cross_entropy(log_probabilities, labels, targets),
    )


def cross_entropy(log_probabilities: Tensor, labels: Tensor, targets: Tensor | None = None) -> Tensor:
    """Return the cross-entropy [N] of labels int64 [N], or of soft `targets` float [N, num_classes]."""
    if targets is None:
        return -log_probabilities.gather(1, labels[:, None])[:, 0]
    return -(targets * log_probabilities).sum(dim=1)


def binary_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean over the classes [N] for logits float64 [N, K] and targets float64 [N, K]."""
    return functional.binary_cross_entropy_with_logits(logits, targets, reduction="none").mean(dim=1)


def _extend_hits(hits: Tensor, log_probabilities: Tensor, labels: Tensor, num_best: int) -> Tensor:
    """Return `hits` of the first five predictions with columns for the others of the first `num_best`."""
    # The order of equal values depends on the k of `topk`. The first five are always those of k = 5, so that the
    # metrics of every evaluation do not depend on which others are named. A label that is among the first five only
    # of `num_best` counts as the sixth.
    more = log_probabilities.topk(min(num_best, log_probabilities.shape[1]), dim=1).indices == labels[:, None]
    others = more[:, 5:].clone()
    others[:, :1] |= more[:, :5].any(dim=1, keepdim=True)
    return torch.cat([hits, others & ~hits.any(dim=1, keepdim=True)], dim=1)


@dataclass(frozen=True)
class EvalCounts:
    """Counts of images on the device; adding a batch never synchronizes.

    `scores` float64 [4]: images, top-1 correct, top-5 correct, summed cross-entropy. `bins` float64 [3, 15] by
    confidence: images, summed confidence, correct. `classes` int64 [3, num_classes]: images by true class, correct ones
    among them, and images by predicted class.
    `confusion` int64 [num_classes, num_classes]: images by true class (rows) and predicted class (columns), or [0, 0]
    for more than `MAX_CONFUSION_CLASSES`. `hits` int64 [K]: images whose label is the first, second, ... K-th
    prediction, or [0] if no top-k accuracy is needed beyond the two in `scores`.
    """

    scores: Tensor
    bins: Tensor
    classes: Tensor
    confusion: Tensor
    hits: Tensor

    @classmethod
    def zeros(cls, num_classes: int, device: torch.device, num_best: int = 0) -> Self:
        """Return the counts of no images; `num_best` is the K of `hits`."""
        side = num_classes if num_classes <= MAX_CONFUSION_CLASSES else 0
        return cls(
            scores=torch.zeros(4, dtype=torch.float64, device=device),
            bins=torch.zeros(3, NUM_BINS, dtype=torch.float64, device=device),
            classes=torch.zeros(3, num_classes, dtype=torch.int64, device=device),
            confusion=torch.zeros(side, side, dtype=torch.int64, device=device),
            hits=torch.zeros(min(num_best, num_classes), dtype=torch.int64, device=device),
        )

    def add(self, predictions: Predictions) -> None:
        """Count a batch."""
        labels, hits, predicted, confidence, losses = predictions
        correct, ones = hits[:, 0].double(), torch.ones_like(losses)
        self.scores.add_(torch.stack([ones, correct, hits[:, :5].sum(dim=1).double(), losses]).sum(dim=1))
        self.bins.add_(_sum_by_bin(confidence, torch.stack([ones, confidence, correct])))
        self.classes[0].index_add_(0, labels, torch.ones_like(labels))
        self.classes[1].index_add_(0, labels, hits[:, 0].long())
        self.classes[2].index_add_(0, predicted, torch.ones_like(labels))
        if self.hits.numel():
            self.hits.add_(hits.sum(dim=0))
        if self.confusion.numel():
            cells = labels * self.classes.shape[1] + predicted
            self.confusion.view(-1).index_add_(0, cells, torch.ones_like(labels))

    def reduce(self, reduce: Callable[[Tensor], Tensor]) -> "EvalCounts":
        """Return the counts with `reduce`, such as a sum over ranks, applied to each tensor."""
        hits = reduce(self.hits) if self.hits.numel() else self.hits
        return EvalCounts(reduce(self.scores), reduce(self.bins), reduce(self.classes), reduce(self.confusion), hits)

    @property
    def images(self) -> int:
        """Number of images counted. Waits for the device."""
        return int(self.scores[0].item())

    def to_result(self) -> EvalResult:
        """Return the metrics of at least one image."""
        images, top1, top5, loss = self.scores.tolist()
        return EvalResult(
            images=int(images),
            top1=top1 / images,
            top5=top5 / images,
            loss=loss / images,
            ece=expected_calibration_error(self.bins),
            mean_class_accuracy=mean_class_accuracy(self.classes),
        )

    def top_k_shares(self) -> list[float]:
        """Return top-1 to top-K accuracy; [] without `hits`."""
        return [hits / self.images for hits in self.hits.cumsum(0).tolist()]

    def to_class_table(self, names: Sequence[str]) -> ClassTable:
        """Return the per-class counts for classes called `names`, and the calibration bins."""
        rows = zip(names, *self.classes.tolist(), strict=True)
        return ClassTable(
            classes=tuple(ClassCount(printable_class_name(name), *counts) for name, *counts in rows),
            confusion=tuple(map(tuple, self.confusion.tolist())),
            calibration=calibration_bins(self.bins),
        )


@dataclass(frozen=True)
class LabelCounts:
    """Counts of images with several labels on the device; adding a batch never synchronizes.

    `scores` float64 [3]: images, images whose labels are all predicted and no others, and summed binary cross-entropy,
    which is a mean over the classes of each image. `classes` int64 [3, num_classes]: images with each label, those
    among them for which it is predicted, and images for which it is predicted.
    """

    scores: Tensor
    classes: Tensor

    @classmethod
    def zeros(cls, num_classes: int, device: torch.device) -> Self:
        """Return the counts of no images."""
        scores = torch.zeros(3, dtype=torch.float64, device=device)
        return cls(scores, torch.zeros(3, num_classes, dtype=torch.int64, device=device))

    def add(self, logits: Tensor, targets: Tensor, threshold: float) -> None:
        """Count logits float [N, K] for targets float [N, K]; probabilities above `threshold` are predicted labels."""
        logits, targets = logits.double(), targets.double()
        # float32, as `paceline predict` reports them.
        is_predicted, is_label = logits.sigmoid().float() > threshold, targets >= LABEL_SHARE
        losses = binary_cross_entropy(logits, targets)
        is_exact = (is_predicted == is_label).all(dim=1).double()
        self.scores.add_(torch.stack([torch.ones_like(losses), is_exact, losses]).sum(dim=1))
        self.classes.add_(torch.stack([is_label, is_label & is_predicted, is_predicted]).sum(dim=1))

    def reduce(self, reduce: Callable[[Tensor], Tensor]) -> "LabelCounts":
        """Return the counts with `reduce`, such as a sum over ranks, applied to each tensor."""
        return LabelCounts(reduce(self.scores), reduce(self.classes))

    def to_result(self) -> EvalResult:
        """Return the metrics of at least one image that need no scores: micro averages are over all labels."""
        images, exact, loss = self.scores.tolist()
        labels, correct, predicted = self.classes.sum(dim=1).tolist()
        metrics = {
            "micro_precision": correct / predicted if predicted else 0.0,
            "micro_recall": correct / labels if labels else 0.0,
            "micro_f1": 2 * correct / (labels + predicted) if labels + predicted else 0.0,
            "subset_accuracy": exact / images,
            "hamming_loss": (labels + predicted - 2 * correct) / (images * self.classes.shape[1]),
        }
        return EvalResult(images=int(images), loss=loss / images, metrics=metrics)

    def to_class_table(self, names: Sequence[str]) -> ClassTable:
        """Return the per-class counts for classes called `names`."""
        rows = zip(names, *self.classes.tolist(), strict=True)
        return ClassTable(tuple(ClassCount(printable_class_name(name), *counts) for name, *counts in rows))


def calibration_bins(bins: Tensor) -> tuple[CalibrationBin, ...]:
    """Return the bins of confidence from [3, num_bins]: images, summed confidence, correct."""
    num_bins = bins.shape[1]
    return tuple(
        CalibrationBin(
            low=number / num_bins,
            high=(number + 1) / num_bins,
            images=int(images),
            correct=int(correct),
            confidence=min(1.0, confidence / images) if images else 0.0,
        )
        for number, (images, confidence, correct) in enumerate(bins.T.tolist())
    )


def expected_calibration_error(bins: Tensor) -> float:
    """Return the mean distance between accuracy and confidence per bin, weighted by images.

    `bins` is [3, num_bins]: images, summed confidence, correct. Guo et al. 2017 (arXiv 1706.04599), equation 3.
    """
    images, confidence, correct = bins
    return float((correct - confidence).abs().sum() / images.sum())


def mean_class_accuracy(classes: Tensor) -> float:
    """Return the mean accuracy of the non-empty classes; `classes` is [>=2, num_classes]: images, correct.

    Also called balanced accuracy (Brodersen et al. 2010, doi 10.1109/ICPR.2010.764).
    """
    images, correct = classes[:2, classes[0] > 0].double()
    return float((correct / images).mean())


def _sum_by_bin(confidence: Tensor, values: Tensor) -> Tensor:
    """Sum `values` [K, N] by the bin of `confidence` [N] to [K, NUM_BINS]; bin m of M is (m / M, (m + 1) / M]."""
    # A masked sum, not a scatter-add: its order, and so its rounding, would vary between runs on GPUs.
    bins = (confidence * NUM_BINS).ceil().sub(1).clamp(0, NUM_BINS - 1)
    is_in_bin = bins[:, None] == torch.arange(NUM_BINS, device=confidence.device)
    return (values[:, :, None] * is_in_bin).sum(dim=1)


@dataclass(frozen=True)
class WorstMistakes:
    """The misclassified images with the highest finite loss, on the device; adding a batch never synchronizes.

    `rows` is float64 [K, 5], highest loss first: index, label, predicted, confidence, loss. Ties go to the lower index,
    so that the result does not depend on batches and ranks.
    """

    rows: Tensor

    @classmethod
    def empty(cls, number: int, device: torch.device) -> Self:
        """Return an empty tracker of `number` mistakes."""
        return cls(torch.full((number, _COLUMNS), _EMPTY_LOSS, dtype=torch.float64, device=device))

    def add(self, predictions: Predictions, indices: NDArray[np.int64]) -> None:
        """Add a batch with sample indices int64 [N]."""
        # CUDA copies up to 64 KB (8,192 indices) from pageable memory without synchronizing.
        index = torch.from_numpy(indices).to(self.rows.device, non_blocking=True)
        is_candidate = (predictions.predicted != predictions.labels) & predictions.losses.isfinite()
        losses = torch.where(is_candidate, predictions.losses, _EMPTY_LOSS)
        # Indices up to 2^53 are exact in float64.
        columns = [index, predictions.labels, predictions.predicted, predictions.confidence, losses]
        batch = torch.stack([column.double() for column in columns], dim=1)
        self.rows.copy_(_top_rows(torch.cat([self.rows, batch]), len(self.rows)))

    def merge_ranks(self, all_gather: Callable[[Tensor], Tensor]) -> "WorstMistakes":
        """Return the worst mistakes of all ranks; `all_gather` is an all-gather to [world_size, ...]. Collective."""
        return WorstMistakes(_top_rows(all_gather(self.rows).flatten(0, 1), len(self.rows)))

    def to_mistakes(self) -> tuple[MisclassifiedImage, ...]:
        """Return up to K mistakes, worst first. Waits for the device."""
        return tuple(
            MisclassifiedImage(int(index), int(label), int(predicted), confidence, loss)
            for index, label, predicted, confidence, loss in self.rows.tolist()
            if loss != _EMPTY_LOSS
        )


def _top_rows(rows: Tensor, number: int) -> Tensor:
    """Return the first `number` of `rows` [N, 5] by descending loss, then ascending index."""
    # Two stable sorts, since `topk` promises no order among equal values.
    rows = rows[rows[:, _INDEX].argsort(stable=True)]
    return rows[rows[:, _LOSS].argsort(descending=True, stable=True)[:number]]
