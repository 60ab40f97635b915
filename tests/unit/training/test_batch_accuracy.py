"""Accuracy on training batches equals a reference count; mixed images count by their largest share."""

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.training.metrics_logger import (
    BatchAccuracy,
    to_correct_counts,
)
from paceline.training.state import CorrectCounts

CPU = torch.device("cpu")


def reference_counts(logits: Tensor, labels: Tensor) -> CorrectCounts:
    order = np.argsort(-logits.double().numpy(), axis=1)
    places = [int(np.flatnonzero(row == label)[0]) for row, label in zip(order, labels.numpy(), strict=True)]
    return CorrectCounts(len(places), sum(place == 0 for place in places), sum(place < 5 for place in places))


def counted(accuracy: BatchAccuracy, images: int) -> CorrectCounts:
    return to_correct_counts(accuracy.pop_counts(), images)


@pytest.mark.parametrize("num_classes", [2, 5, 12])
def test_batches_match_the_reference_and_a_read_resets_the_counts(num_classes: int) -> None:
    torch.manual_seed(num_classes)
    accuracy = BatchAccuracy(num_classes, CPU)
    logits, labels = torch.randn(90, num_classes, requires_grad=True), torch.randint(num_classes, (90,))
    for part in range(3):
        accuracy.add(logits[part::3], labels[part::3])
    assert counted(accuracy, 90) == reference_counts(logits.detach(), labels)
    accuracy.add(logits[:10], labels[:10])
    assert counted(accuracy, 10) == reference_counts(logits[:10].detach(), labels[:10])


def test_mixed_images_count_by_their_largest_share() -> None:
    torch.manual_seed(0)
    logits, first, second = torch.randn(64, 7), torch.randint(7, (64,)), torch.randint(7, (64,))
    shares = torch.rand(64, 1)
    one_hot = torch.nn.functional.one_hot
    targets = shares * one_hot(first, 7) + (1 - shares) * one_hot(second, 7)
    accuracy = BatchAccuracy(7, CPU)
    accuracy.add(logits, targets)
    assert counted(accuracy, 64) == reference_counts(logits, torch.where(shares[:, 0] > 0.5, first, second))


def test_half_precision_logits_are_counted() -> None:
    logits, labels = torch.eye(6).bfloat16(), torch.arange(6)
    accuracy = BatchAccuracy(6, CPU)
    accuracy.add(logits, labels.roll(3))
    accuracy.add(logits, labels)
    assert counted(accuracy, 12).top1 == 6
