"""The misclassified images of the highest loss, kept while an evaluation runs. It knows no ranks and no pixels."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.mistake import Mistake
from paceline.train.metrics import Answers

_COLUMNS = 5
_INDEX, _LABEL, _PREDICTED, _CONFIDENCE, _LOSS = range(_COLUMNS)
_NONE = -torch.inf
"""The loss of a row that holds no image."""


class Mistakes(Protocol):
    """Keep the worst mistakes of an evaluation."""

    def add(self, answers: Answers, indices: NDArray[np.int64]) -> None:
        """Look at a batch, whose sample indices are int64 [N]."""
        ...

    def over(self, every: Callable[[Tensor], Tensor]) -> "Mistakes":
        """Return the worst of all ranks; `every` returns [world_size, ...] of what each has. Every rank must call."""
        ...

    def listed(self) -> tuple[Mistake, ...]:
        """Return them, the worst first; waits for the device."""
        ...


@dataclass(frozen=True)
class Worst:
    """The mistakes of the highest loss so far, on the device; adding to them never waits for it.

    `rows` is float64 [K, 5], the highest loss first: index, label, predicted, confidence, loss. Of equal losses the
    lower index comes first, so the K worst of all are those of the K worst of each part. A loss that is infinite or no
    number is left out: it says nothing about the image.
    """

    rows: Tensor

    @classmethod
    def none(cls, number: int, device: torch.device) -> Self:
        """Return room for `number` mistakes, and none yet."""
        return cls(torch.full((number, _COLUMNS), _NONE, dtype=torch.float64, device=device))

    def add(self, answers: Answers, indices: NDArray[np.int64]) -> None:
        """Keep the worst of those kept and those of the batch. Indices are exact in float64 up to 2^53."""
        # CUDA copies up to 64 KB, 8,192 images, from memory that is not page-locked without waiting for the device.
        index = torch.from_numpy(indices).to(self.rows.device, non_blocking=True)
        is_kept = (answers.predicted != answers.labels) & answers.losses.isfinite()
        losses = torch.where(is_kept, answers.losses, _NONE)
        columns = [index, answers.labels, answers.predicted, answers.confidence, losses]
        batch = torch.stack([column.double() for column in columns], dim=1)
        self.rows.copy_(_worst(torch.cat([self.rows, batch]), len(self.rows)))

    def over(self, every: Callable[[Tensor], Tensor]) -> "Worst":
        """Return the worst of all ranks, the same on each."""
        return Worst(_worst(every(self.rows).flatten(0, 1), len(self.rows)))

    def listed(self) -> tuple[Mistake, ...]:
        """Return up to K mistakes, the worst first."""
        return tuple(
            Mistake(int(index), int(label), int(predicted), confidence, loss)
            for index, label, predicted, confidence, loss in self.rows.tolist()
            if loss != _NONE
        )


class NoMistakes:
    """Keep none."""

    def add(self, answers: Answers, indices: NDArray[np.int64]) -> None:
        """Do nothing."""

    def over(self, every: Callable[[Tensor], Tensor]) -> "NoMistakes":
        """Return the same; no rank asks another."""
        return self

    def listed(self) -> tuple[Mistake, ...]:
        """Return none."""
        return ()


def build_mistakes(number: int, device: torch.device) -> Mistakes:
    """Return what keeps the `number` worst mistakes, of which there may be 0."""
    return Worst.none(number, device) if number else NoMistakes()


def _worst(rows: Tensor, number: int) -> Tensor:
    """Return the first `number` of `rows` [N, 5] by falling loss, then by rising index.

    Two stable sorts: `topk` promises no order among equals.
    """
    rows = rows[rows[:, _INDEX].argsort(stable=True)]
    return rows[rows[:, _LOSS].argsort(descending=True, stable=True)[:number]]
