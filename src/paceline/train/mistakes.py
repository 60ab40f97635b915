"""The misclassified images with the highest loss of an evaluation."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.mistake import MisclassifiedImage
from paceline.train.metrics import Predictions

_COLUMNS = 5
_INDEX, _LABEL, _PREDICTED, _CONFIDENCE, _LOSS = range(_COLUMNS)
_EMPTY_LOSS = -torch.inf
"""Loss of an empty row."""


class MistakeTracker(Protocol):
    """Keep the misclassified images with the highest loss."""

    def add(self, predictions: Predictions, indices: NDArray[np.int64]) -> None:
        """Add a batch with sample indices int64 [N]."""
        ...

    def merge_ranks(self, all_gather: Callable[[Tensor], Tensor]) -> "MistakeTracker":
        """Return the worst mistakes of all ranks; `all_gather` is an all-gather to [world_size, ...]. Collective."""
        ...

    def to_mistakes(self) -> tuple[MisclassifiedImage, ...]:
        """Return the mistakes, worst first. Waits for the device."""
        ...


@dataclass(frozen=True)
class TopLossSamples:
    """The mistakes with the highest loss so far, on the device; adding a batch never synchronizes.

    `rows` is float64 [K, 5], highest loss first: index, label, predicted, confidence, loss. Ties go to the lower index,
    so the result does not depend on how the images are split. Non-finite losses are excluded.
    """

    rows: Tensor

    @classmethod
    def empty(cls, number: int, device: torch.device) -> Self:
        """Return an empty tracker of `number` mistakes."""
        return cls(torch.full((number, _COLUMNS), _EMPTY_LOSS, dtype=torch.float64, device=device))

    def add(self, predictions: Predictions, indices: NDArray[np.int64]) -> None:
        """Merge a batch. Indices up to 2^53 are exact in float64."""
        # CUDA copies up to 64 KB (8,192 indices) from pageable memory without synchronizing.
        index = torch.from_numpy(indices).to(self.rows.device, non_blocking=True)
        is_candidate = (predictions.predicted != predictions.labels) & predictions.losses.isfinite()
        losses = torch.where(is_candidate, predictions.losses, _EMPTY_LOSS)
        columns = [index, predictions.labels, predictions.predicted, predictions.confidence, losses]
        batch = torch.stack([column.double() for column in columns], dim=1)
        self.rows.copy_(_top_rows(torch.cat([self.rows, batch]), len(self.rows)))

    def merge_ranks(self, all_gather: Callable[[Tensor], Tensor]) -> "TopLossSamples":
        """Return the worst mistakes of all ranks, the same on each."""
        return TopLossSamples(_top_rows(all_gather(self.rows).flatten(0, 1), len(self.rows)))

    def to_mistakes(self) -> tuple[MisclassifiedImage, ...]:
        """Return up to K mistakes, worst first."""
        return tuple(
            MisclassifiedImage(int(index), int(label), int(predicted), confidence, loss)
            for index, label, predicted, confidence, loss in self.rows.tolist()
            if loss != _EMPTY_LOSS
        )


class NoMistakeTracker:
    """Keep no mistakes."""

    def add(self, predictions: Predictions, indices: NDArray[np.int64]) -> None:
        """Do nothing."""

    def merge_ranks(self, all_gather: Callable[[Tensor], Tensor]) -> "NoMistakeTracker":
        """Return this object without communication."""
        return self

    def to_mistakes(self) -> tuple[MisclassifiedImage, ...]:
        """Return an empty tuple."""
        return ()


def build_mistake_tracker(number: int, device: torch.device) -> MistakeTracker:
    """Return a tracker of the `number` worst mistakes; 0 tracks none."""
    return TopLossSamples.empty(number, device) if number else NoMistakeTracker()


def _top_rows(rows: Tensor, number: int) -> Tensor:
    """Return the first `number` of `rows` [N, 5] by descending loss, then ascending index."""
    # Two stable sorts, since `topk` promises no order among equal values.
    rows = rows[rows[:, _INDEX].argsort(stable=True)]
    return rows[rows[:, _LOSS].argsort(descending=True, stable=True)[:number]]
