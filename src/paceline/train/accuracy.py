"""How many images of the training batches are classified correctly as they are trained on, counted on the device.

It costs a look at logits that are there anyway: nothing is evaluated, and a step waits for no device.
"""

from typing import Protocol

import torch
from torch import Tensor

from paceline.train.state import Correct


class BatchAccuracy(Protocol):
    """Count the images of a rank's training batches that are classified correctly."""

    def add(self, logits: Tensor, targets: Tensor) -> None:
        """Count a batch of logits float [N, C] and `targets`: classes int64 [N], or probabilities float [N, C]."""
        ...

    def take(self) -> Tensor | None:
        """Return how often the target was first, second, ..., int64 [min(5, C)], and begin anew; None if off."""
        ...


class NoAccuracy:
    """Count nothing."""

    def add(self, logits: Tensor, targets: Tensor) -> None:
        """Do nothing."""

    def take(self) -> None:
        """Return None."""


class DeviceAccuracy:
    """Count on `device`, in memory that stays in place, so that a captured step counts as well.

    The target of mixed images is the class with the largest share, as in torchvision's references; of two equal shares
    it is the class that comes first. Equal logits are ranked as `topk` ranks them, in evaluation too.
    """

    def __init__(self, num_classes: int, device: torch.device) -> None:
        self._counts = torch.zeros(min(5, num_classes), dtype=torch.int64, device=device)

    def add(self, logits: Tensor, targets: Tensor) -> None:
        """Count a batch."""
        with torch.no_grad():
            labels = targets.argmax(dim=1) if targets.is_floating_point() else targets
            best = logits.topk(len(self._counts), dim=1).indices
            self._counts.add_((best == labels[:, None]).sum(dim=0))

    def take(self) -> Tensor:
        """Return the counts so far, int64 [min(5, C)], and begin anew."""
        counts = self._counts.clone()
        self._counts.zero_()
        return counts


def correct(counts: Tensor, images: int) -> Correct:
    """Return what `counts`, by the rank of the target, come to over `images` images; waits for the device."""
    by_rank = counts.tolist()
    return Correct(images, by_rank[0], sum(by_rank))


def build_accuracy(switch: str, num_classes: int, device: torch.device) -> BatchAccuracy:
    """Return what `train.accuracy` asks for."""
    return DeviceAccuracy(num_classes, device) if switch == "on" else NoAccuracy()
