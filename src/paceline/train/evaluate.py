"""Evaluate exactly: every image counted once, whatever the number of ranks; integers summed, the count asserted."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import nn

from paceline.core.class_table import ClassTable
from paceline.core.errors import DataError
from paceline.core.mistake import Mistake
from paceline.core.results import EvalResult
from paceline.data.bad import BadImage
from paceline.data.loader import Loader
from paceline.data.placement import Placement
from paceline.models.modes import evaluating
from paceline.parallel.strategy import Strategy
from paceline.train.metrics import Tally, answers
from paceline.train.mistakes import build_mistakes
from paceline.train.precision import Precision
from paceline.train.views import AsIs, Views


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
