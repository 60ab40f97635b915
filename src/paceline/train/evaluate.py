"""Evaluate exactly: every image counted once, whatever the number of ranks; integers summed, the count asserted."""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from paceline.core.class_table import ClassTable
from paceline.core.results import EvalResult
from paceline.data.loader import Loader
from paceline.data.placement import Placement
from paceline.parallel.strategy import Strategy
from paceline.train.metrics import Tally
from paceline.train.precision import Precision
from paceline.train.views import AsIs, Views


class Evaluation(NamedTuple):
    """What an evaluation came to, and the same class by class."""

    result: EvalResult
    classes: ClassTable


@dataclass(frozen=True)
class Evaluator:
    """Evaluate a model on a rank's `num_batches` batches, and sum over the ranks to all `num_images` images.

    The host waits for the device once, at the end.
    """

    loader: Loader
    num_batches: int
    num_images: int
    class_names: tuple[str, ...]
    place: Placement
    precision: Precision
    strategy: Strategy
    device: torch.device
    views: Views = field(default_factory=AsIs)

    def __call__(self, model: nn.Module) -> Evaluation:
        """Return accuracies, mean cross-entropy (without label smoothing) and calibration. Every rank must call it."""
        tally = Tally.zeros(len(self.class_names), self.device)
        was_training = model.training
        model.eval()
        with self.strategy.evaluating(model), torch.inference_mode():
            for batch in self.loader.batches(0, self.num_batches):
                placed = self.place(batch)
                with self.precision.autocast():
                    logits = self.views(model, self.place.normalise(placed.images))
                tally.add(logits, placed.labels)
        model.train(was_training)
        whole = tally.over(self.strategy.sum)
        assert whole.images == self.num_images, f"{whole.images} images were counted of {self.num_images}"
        return Evaluation(whole.result(), whole.table(self.class_names))
