"""Evaluate exactly: every image counted once, whatever the number of ranks; integers summed, the count asserted."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from paceline.core.class_table import ClassTable
from paceline.core.errors import DataError
from paceline.core.mistake import Mistake
from paceline.core.results import BatchNormCheck, EvalResult
from paceline.data.bad import BadImage
from paceline.data.loader import Loader
from paceline.data.placement import Placement
from paceline.models.modes import batch_statistics, evaluating
from paceline.parallel.strategy import Strategy
from paceline.train.metrics import Tally, answers
from paceline.train.mistakes import build_mistakes
from paceline.train.precision import Precision
from paceline.train.views import AsIs, Views

_MIXED: Final = 128
"""Images whose common statistics stand for those of training; as many are put through the model at once."""


class Evaluation(NamedTuple):
    """What an evaluation came to, the same class by class, and the misclassified images of the highest loss."""

    result: EvalResult
    classes: ClassTable
    worst: tuple[Mistake, ...] = ()


class LeftOut(Protocol):
    """Take note of images that could not be read."""

    def note(self, bad: Iterable[BadImage]) -> int:
        """Keep what this rank has met; return how many of these were not known."""
        ...

    def settle(self) -> None:
        """Tell all ranks, each of which must call it."""
        ...


class NothingLeftOut:
    """For data sets whose every image can be read, or ends the run."""

    def note(self, bad: Iterable[BadImage]) -> int:
        """Return 0."""
        return 0

    def settle(self) -> None:
        """Do nothing."""


def never() -> bool:
    """Return False: a rank that stays until its batches are done."""
    return False


@dataclass(frozen=True)
class Evaluator:
    """Evaluate a model on a rank's `num_batches` batches, and sum over the ranks to all `num_images` images.

    `worst` is how many misclassified images are kept. The host waits for the device once, at the end.
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
    leaves: Callable[[], bool] = never
    left_out: LeftOut = field(default_factory=NothingLeftOut)
    worst: int = 0

    def __call__(self, model: nn.Module) -> Evaluation | None:
        """Return accuracies, mean cross-entropy (without label smoothing) and calibration. Every rank must call it.

        Return None when a rank `leaves` before its batches are done. Images that could not be read are `left_out`.
        """
        left, met, new = False, 0, 0
        tally, mistakes = Tally.zeros(len(self.class_names), self.device), build_mistakes(self.worst, self.device)
        with evaluating(model), self.strategy.evaluating(model), torch.inference_mode():
            for batch in self.loader.batches(0, self.num_batches):
                left = self.leaves()
                if left:
                    break
                met += len(batch.bad)
                new += self.left_out.note(batch.bad)
                if not len(batch):
                    continue
                placed = self.place(batch)
                with self.precision.autocast():
                    logits = self.views(model, self.place.normalise(placed.images))
                found = answers(logits, placed.labels)
                tally.add(found)
                mistakes.add(found, batch.indices)
        whole = tally.over(self.strategy.sum)
        noted = torch.tensor([left, met, new], dtype=torch.int64, device=self.device)
        left_ranks, all_met, all_new = self.strategy.sum(noted).tolist()
        if left_ranks:
            return None
        counted = whole.images + all_met
        assert counted == self.num_images, f"{counted} images were counted of {self.num_images}"
        if all_new:
            self.left_out.settle()
        if not whole.images:
            raise DataError(f"data.source: none of the {self.num_images:,} images to evaluate can be read (mend them)")
        worst = mistakes.over(self.strategy.every).listed()
        return Evaluation(whole.result(), whole.table(self.class_names), worst)


@dataclass(frozen=True)
class BatchNormChecker:
    """Classify training images with batch norm's running statistics, and with those of the batches themselves.

    Running statistics average over past steps. Where steps move the weights far, they describe a model that is no
    more, and evaluation fails though training does not. Each rank takes its own `num_batches` of `loader`.
    """

    loader: Loader
    num_batches: int
    place: Placement
    precision: Precision
    strategy: Strategy
    device: torch.device

    def __call__(self, model: nn.Module) -> BatchNormCheck | None:
        """Return how many are right each way, over all ranks; None without batch norm. Every rank must call it."""
        counts = torch.zeros(3, dtype=torch.int64, device=self.device)
        with self.strategy.evaluating(model), torch.inference_mode():
            for images, labels in self._mixed():
                with evaluating(model):
                    running = self._correct(model, images, labels)
                with batch_statistics(model) as has_norms:
                    batch = self._correct(model, images, labels)
                if not has_norms:
                    break
                counts += torch.stack([torch.tensor(len(labels), device=self.device), running, batch])
        images_seen, running_right, batch_right = self.strategy.sum(counts).tolist()
        if not images_seen:
            return None
        return BatchNormCheck(images=images_seen, running=running_right, batch=batch_right)

    def _correct(self, model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        with self.precision.autocast():
            logits: Tensor = model(images)
        return (logits.argmax(dim=1) == labels).sum()

    def _mixed(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches of mixed classes: folders list images class by class, and a batch of one class has other
        statistics than those that were trained on."""
        batches = [batch for batch in self.loader.batches(0, self.num_batches) if len(batch)]
        if sum(map(len, batches)) < 2:  # of one image there are no statistics
            return
        images, labels = torch.cat([each.images for each in batches]), torch.cat([each.labels for each in batches])
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        at_once = max(2, min(_MIXED, max(map(len, batches))))  # no more than evaluation has shown to fit into memory
        for chosen in torch.split(order, at_once):
            if len(chosen) == at_once or len(order) < at_once:
                yield self.place.normalise(images[chosen].to(self.device)), labels[chosen].to(self.device)
