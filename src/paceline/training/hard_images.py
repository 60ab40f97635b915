"""Hard-example mining (`data.sampler=hard`): measure the loss of every training image, and weigh images by it."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from paceline.data.hard_sampler import ImageWeights
from paceline.parallel.strategy import Strategy
from paceline.recipe.schema.sampler import Hard
from paceline.training.evaluator import SplitEvaluator
from paceline.training.metrics import binary_cross_entropy, cross_entropy

_MEAN_WEIGHT: Final = 1 << 20
"""Weights are whole numbers around this mean, whose sums are exact."""


@final
class LossMeter:
    """The loss of each of `num_images` images, without label smoothing; 0 for those that cannot be read.

    It is the cross-entropy of the label or of a row of soft `targets`, float32 [T, num_classes] on the device; of
    several labels (`is_multi_label`), the binary cross-entropy, as evaluations report them.
    """

    def __init__(
        self, num_images: int, device: torch.device, targets: Tensor | None = None, *, is_multi_label: bool = False
    ) -> None:
        self._losses = torch.zeros(num_images, dtype=torch.float64, device=device)
        self._num_images = torch.zeros(1, dtype=torch.int64, device=device)
        self._targets = targets
        self._is_multi_label = is_multi_label

    def add(self, logits: Tensor, labels: Tensor, indices: NDArray[np.int64]) -> None:
        """Store the losses of a batch."""
        targets = None if self._targets is None else self._targets[labels].double()
        if self._is_multi_label and targets is not None:
            losses = binary_cross_entropy(logits.double(), targets)
        else:
            losses = cross_entropy(logits.double().log_softmax(dim=1), labels, targets)
        self._losses[torch.from_numpy(indices).to(labels.device)] = losses
        self._num_images += len(labels)

    def sum_over_ranks(self, strategy: Strategy) -> int:
        """Collect the losses of all ranks, each of which is from one of them; return the number of images."""
        self._losses = strategy.sum(self._losses)
        return int(strategy.sum(self._num_images).item())

    def losses(self) -> NDArray[np.float64]:
        """Return the losses, float64 [M]."""
        losses: NDArray[np.float64] = self._losses.cpu().numpy()
        return losses


def weigh_losses(losses: NDArray[np.float64], section: Hard) -> NDArray[np.int64]:
    """Return the weights, int64 [M] above 0, of images with `losses` [M]; those that are not finite are the highest."""
    is_finite = np.isfinite(losses)
    highest = losses[is_finite].max(initial=0.0)
    weights = np.where(is_finite, losses, highest) ** section.power
    mean = weights.mean()
    if not 0 < mean < np.inf:
        return np.ones(len(losses), dtype=np.int64)
    by_loss = section.share * np.minimum(weights / mean, section.limit)
    # All images share the rest of the draws alike. Divided by their own mean, which may be far below 1 if a few images
    # have most of the loss, the limited weights would exceed the limit again.
    relative = by_loss + (1 - by_loss.mean())
    whole: NDArray[np.int64] = np.maximum(1, np.rint(_MEAN_WEIGHT * relative)).astype(np.int64)
    return whole


@dataclass(frozen=True)
class ImageWeigher:
    """Update `weights` from the losses of all training images, as `evaluator` counts them with a `new_meter`.

    This is done after `steps` steps. Rank 0 (`is_main`) computes the weights, and passes a record of them to `log`.
    """

    section: Hard
    steps: range
    weights: ImageWeights
    evaluator: SplitEvaluator
    new_meter: Callable[[], LossMeter]
    is_main: bool
    log: Callable[[dict[str, Any]], None]

    def is_due(self, step: int) -> bool:
        """Return whether images are to be weighed after `step` steps; those of a resumed run may already be."""
        return step in self.steps and step != self.weights.step

    def split(self, first: int, stop: int) -> list[range]:
        """Split steps `first` to `stop` - 1 into those between measurements, past which no batch may be prefetched."""
        measured = (step for step in self.steps if first < step < stop)
        return [range(*part) for part in pairwise([first, *measured, stop])]

    def __call__(self, model: nn.Module, step: int) -> bool:
        """Weigh the images by their losses with `model`; return False if a rank has to stop meanwhile. Collective."""
        meter = self.new_meter()
        if not self.evaluator.count(model, meter):
            return False
        losses, evaluator = meter.losses(), self.evaluator
        # Rank 0's weights on every rank, by adding zeros: the last bit of a power may differ between CPUs.
        weights = weigh_losses(losses, self.section) if self.is_main else np.zeros(len(losses), dtype=np.int64)
        shared = evaluator.strategy.sum(torch.from_numpy(weights).to(evaluator.device))
        self.weights.update(shared.cpu().numpy(), step)
        if self.is_main:
            effective = round(self.weights.effective_images, 1)
            mean_loss = float(losses.mean())
            record = {"step": step, "images": len(losses), "mean_loss": mean_loss if np.isfinite(mean_loss) else None}
            self.log({**record, "effective_images": effective})
        return True
