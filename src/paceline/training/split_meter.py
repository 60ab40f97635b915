"""The metrics of a split from its batches: `ClassMeter` for one label per image, `LabelMeter` for several."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.metric import COUNTED, MULTI_LABEL, SCORED
from paceline.core.results import Calibration, ClassCount, ClassTable, EvalResult, ImagePrediction, MisclassifiedImage
from paceline.parallel.strategy import Strategy
from paceline.training.calibration import calibrate
from paceline.training.metrics import EvalCounts, LabelCounts, WorstMistakes, predict_batch
from paceline.training.scores import (
    NO_METRICS,
    ExtraMetrics,
    ImageScores,
    ScoreCollector,
    do_nothing,
    log_softmax,
)


class SplitEvaluation(NamedTuple):
    """Metrics, per-class counts, the misclassified images with the highest loss, and on rank 0 what was requested."""

    result: EvalResult
    classes: ClassTable
    worst: tuple[MisclassifiedImage, ...] = ()
    calibration: Calibration | None = None
    predictions: tuple[ImagePrediction, ...] = ()


class BatchMeter(Protocol):
    """Count the batches of this rank, then add up the counts of all ranks."""

    def add(self, logits: Tensor, labels: Tensor, indices: NDArray[np.int64]) -> None:
        """Count logits float [N, K] of images `indices` int64 [N] with labels int64 [N]."""
        ...

    def sum_over_ranks(self, strategy: Strategy) -> int:
        """Add up the counts of all ranks; return the number of images. Collective."""
        ...


class SplitMeter(BatchMeter, Protocol):
    """Compute the metrics of all ranks from the counts."""

    def evaluate(self, strategy: Strategy, names: Sequence[str]) -> SplitEvaluation:
        """Return the metrics of at least one image, of classes called `names`. Collective."""
        ...


@dataclass(frozen=True)
class GatheredMetrics:
    """Extra `metrics`, for which rank 0 gathers the scores of all images if they need them.

    `on_progress` is called on every rank while rank 0 computes metrics of scores.
    """

    metrics: ExtraMetrics
    collector: ScoreCollector | None
    device: torch.device
    on_progress: Callable[[], None] = do_nothing

    def measure(
        self, classes: Sequence[ClassCount], shares: Sequence[float], strategy: Strategy
    ) -> tuple[dict[str, float], tuple[ClassCount, ...]]:
        """Return the metrics by name, and `classes` with those of each class. Collective."""

        def share_progress() -> None:
            # Count as progress on all ranks that rank 0 has computed a part of the metrics of scores.
            if self.collector:
                strategy.sum(torch.zeros(1, dtype=torch.int64, device=self.device)).tolist()  # waits for rank 0
                self.on_progress()

        images = self.collector.gather(strategy, len(classes), self.device) if self.collector else None
        values, measured = self.metrics.measure(classes, shares, images, share_progress)
        if self.collector and strategy.world_size > 1:  # rank 0 has the scores; all need what is monitored
            row = torch.tensor(list(values.values()), dtype=torch.float64, device=self.device)
            row = row if images is not None else torch.zeros_like(row)
            values = dict(zip(values, strategy.sum(row).tolist(), strict=True))
        return values, tuple(measured)


class ClassMeter:
    """Count images of one class each, or with soft labels, rows of `targets` [T, K], by the class of largest share."""

    def __init__(
        self,
        num_classes: int,
        device: torch.device,
        targets: Tensor | None = None,
        num_worst: int = 0,
        metrics: ExtraMetrics = NO_METRICS,
        on_progress: Callable[[], None] = do_nothing,
        *,
        calibrates: bool = False,
        lists_predictions: bool = False,
    ) -> None:
        self._num_best = metrics.num_best
        self._counts = EvalCounts.zeros(num_classes, device, self._num_best if metrics.names else 0)
        self._mistakes = WorstMistakes.empty(num_worst, device) if num_worst else None
        self._collector = ScoreCollector() if metrics.needs_scores else None
        # Log-probabilities, as a constant per image changes no temperature, and float32 is most precise around 0.
        self._logits = ScoreCollector(log_softmax) if calibrates else None
        self._predictions = ScoreCollector(_first_prediction) if lists_predictions else None
        self._device = device
        self._targets = targets
        self._gathered = GatheredMetrics(metrics, self._collector, device, on_progress)

    def add(self, logits: Tensor, labels: Tensor, indices: NDArray[np.int64]) -> None:
        """Count a batch."""
        targets = None if self._targets is None else self._targets[labels]
        classes = labels if targets is None else targets.argmax(dim=1)
        predictions = predict_batch(logits, classes, self._num_best, targets)
        self._counts.add(predictions)
        if self._mistakes:
            self._mistakes.add(predictions, indices)
        for collector in filter(None, (self._collector, self._logits, self._predictions)):
            collector.add(logits, classes, indices)

    def sum_over_ranks(self, strategy: Strategy) -> int:
        """Add up the counts of all ranks."""
        self._counts = self._counts.reduce(strategy.sum)
        return self._counts.images

    def evaluate(self, strategy: Strategy, names: Sequence[str]) -> SplitEvaluation:
        """Return accuracy, cross-entropy without label smoothing, calibration, and the extra metrics."""
        worst = self._mistakes.merge_ranks(strategy.all_gather).to_mistakes() if self._mistakes else ()
        result, table = self._counts.to_result(), self._counts.to_class_table(names)
        if self._gathered.metrics.names:
            values, classes = self._gathered.measure(table.classes, self._counts.top_k_shares(), strategy)
            result, table = result.model_copy(update={"metrics": values}), replace(table, classes=classes)
        images = self._logits.gather(strategy, len(names), self._device) if self._logits else None
        found = self._predictions.gather(strategy, 2, self._device) if self._predictions else None
        predictions = _list_predictions(found) if found else ()
        return SplitEvaluation(result, table, worst, calibrate(images, result) if images else None, predictions)


def _first_prediction(logits: Tensor) -> Tensor:
    """Return [N, 2]: the predicted class of `predict_batch` and its probability, of logits [N, num_classes]."""
    predictions = predict_batch(logits, torch.zeros(len(logits), dtype=torch.int64, device=logits.device))
    return torch.stack([predictions.predicted, predictions.confidence], dim=1)


def _list_predictions(images: ImageScores) -> tuple[ImagePrediction, ...]:
    assert images.indices is not None, "gathered scores have the indices of their images"
    rows = zip(images.indices.tolist(), images.labels.tolist(), images.scores.tolist(), strict=True)
    return tuple(
        ImagePrediction(index, label, int(predicted), probability) for index, label, (predicted, probability) in rows
    )


class LabelMeter:
    """Count images with several labels, rows of `targets` [T, K] on the device.

    A class whose probability, the sigmoid of its logit, is above `threshold` is predicted.
    """

    def __init__(
        self,
        targets: Tensor,
        threshold: float,
        metrics: ExtraMetrics = NO_METRICS,
        on_progress: Callable[[], None] = do_nothing,
    ) -> None:
        self._counts = LabelCounts.zeros(targets.shape[1], targets.device)
        self._targets = targets
        self._threshold = threshold
        self._collector = ScoreCollector(torch.sigmoid, targets.cpu())
        metrics = replace(metrics, names=(*COUNTED, *SCORED, *metrics.own))
        self._gathered = GatheredMetrics(metrics, self._collector, targets.device, on_progress)

    def add(self, logits: Tensor, labels: Tensor, indices: NDArray[np.int64]) -> None:
        """Count a batch."""
        self._counts.add(logits, self._targets[labels], self._threshold)
        self._collector.add(logits, labels, indices)

    def sum_over_ranks(self, strategy: Strategy) -> int:
        """Add up the counts of all ranks."""
        self._counts = self._counts.reduce(strategy.sum)
        return int(self._counts.scores[0])

    def evaluate(self, strategy: Strategy, names: Sequence[str]) -> SplitEvaluation:
        """Return the metrics of `core.metric.MULTI_LABEL`, binary cross-entropy, and the user's own metrics."""
        result, table = self._counts.to_result(), self._counts.to_class_table(names)
        values, classes = self._gathered.measure(table.classes, (), strategy)
        values |= result.metrics or {}
        own = (name for name in values if name not in MULTI_LABEL)
        ordered = {name: values[name] for name in (*MULTI_LABEL, *own)}
        return SplitEvaluation(result.model_copy(update={"metrics": ordered}), replace(table, classes=classes))
