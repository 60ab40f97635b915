"""Accuracy on training batches, counted on the device without synchronization."""

from typing import Protocol

import torch
from torch import Tensor

from paceline.train.state import CorrectCounts


class BatchAccuracy(Protocol):
    """Count the correctly classified images of this rank's training batches."""

    def add(self, logits: Tensor, targets: Tensor) -> None:
        """Count a batch of logits float [N, C] and `targets`: classes int64 [N], or probabilities float [N, C]."""
        ...

    def pop_counts(self) -> Tensor | None:
        """Return how often the target ranked first, second, ..., int64 [min(5, C)], and reset; None if off."""
        ...


class NoBatchAccuracy:
    """Count nothing."""

    def add(self, logits: Tensor, targets: Tensor) -> None:
        """Do nothing."""

    def pop_counts(self) -> None:
        """Return None."""


class DeviceBatchAccuracy:
    """Count on `device` in place, so that a captured step counts too.

    The target of a mixed image is the class with the largest share, as in torchvision's references; ties go to the
    lower class. Equal logits are ordered by `topk`, as in evaluation.
    """

    def __init__(self, num_classes: int, device: torch.device) -> None:
        self._counts = torch.zeros(min(5, num_classes), dtype=torch.int64, device=device)

    def add(self, logits: Tensor, targets: Tensor) -> None:
        """Count a batch."""
        with torch.no_grad():
            labels = targets.argmax(dim=1) if targets.is_floating_point() else targets
            best = logits.topk(len(self._counts), dim=1).indices
            self._counts.add_((best == labels[:, None]).sum(dim=0))

    def pop_counts(self) -> Tensor:
        """Return the counts, int64 [min(5, C)], and reset them."""
        counts = self._counts.clone()
        self._counts.zero_()
        return counts


def to_correct_counts(counts: Tensor, images: int) -> CorrectCounts:
    """Return top-1 and top-5 counts from counts by rank of the target. Waits for the device."""
    by_rank = counts.tolist()
    return CorrectCounts(images, by_rank[0], sum(by_rank))


def build_batch_accuracy(switch: str, num_classes: int, device: torch.device) -> BatchAccuracy:
    """Return the counter of `train.accuracy`."""
    return DeviceBatchAccuracy(num_classes, device) if switch == "on" else NoBatchAccuracy()
