"""Evaluate exactly: every image counted once, whatever the number of ranks; integers summed, the count asserted."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.core.results import EvalResult
from paceline.data.loader import Batch, Loader
from paceline.data.placement import Placement
from paceline.parallel.strategy import Strategy
from paceline.train.precision import Precision


@dataclass(frozen=True)
class Evaluator:
    """Evaluate a model on a rank's `num_batches` batches, and sum over the ranks to all `num_images` images."""

    loader: Loader
    num_batches: int
    num_images: int
    place: Placement
    precision: Precision
    strategy: Strategy

    def __call__(self, model: nn.Module) -> EvalResult:
        """Return accuracy and mean cross-entropy (without label smoothing). Every rank must call it."""
        self.strategy.align(model)
        was_training = model.training
        model.eval()
        totals = torch.zeros(4, dtype=torch.float64)
        with torch.inference_mode():
            for batch in self.loader.batches(0, self.num_batches):
                totals += self._count(model, batch).cpu()
        model.train(was_training)
        images, top1, top5, loss = self.strategy.sum(self.place.numbers(totals)).tolist()
        assert images == self.num_images, f"{images} images were counted of {self.num_images}"
        return EvalResult(images=int(images), top1=top1 / images, top5=top5 / images, loss=loss / images)

    def _count(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return float64 [images, correct among the first 1, among the first 5, summed loss] of a batch."""
        images, labels = self.place(batch)
        with self.precision.autocast():
            logits = model(self.place.normalise(images))
        logits = logits.double()
        best = logits.topk(min(5, logits.shape[1]), dim=1).indices == labels[:, None]
        loss = functional.cross_entropy(logits, labels, reduction="sum")
        counted = torch.tensor(float(len(labels)), device=labels.device)
        return torch.stack([counted, best[:, 0].sum(), best.sum(), loss]).double()
