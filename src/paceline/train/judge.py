"""Evaluate the raw and averaged weights on the validation set, and the raw ones on training images."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from paceline.core.results import EvalReport
from paceline.train.average import Average
from paceline.train.evaluate import Evaluation

Evaluate = Callable[[nn.Module], Evaluation | None]
"""None: a rank has to stop before the evaluation is complete."""


@dataclass(frozen=True)
class Judge:
    """Run `evaluator` on the raw and the averaged weights, and `train_evaluator` on the raw ones.

    Per-class tables and worst mistakes are those of `EvalReport.judged`.
    """

    evaluator: Evaluate
    average: Average
    train_evaluator: Evaluate | None = None

    def __call__(self, model: nn.Module) -> EvalReport | None:
        """Return the report on `model`, whose weights are restored afterwards, or None if a rank has to stop early.
        Collective.
        """
        raw = self.evaluator(model)
        trained = self.train_evaluator(model) if raw and self.train_evaluator else None
        if raw is None or (self.train_evaluator and trained is None):
            return None
        train = trained and trained.result
        if not self.average.exists:
            return EvalReport(val=raw.result, train=train, classes=raw.classes, worst=raw.worst)
        with self.average.swapped():
            averaged = self.evaluator(model)
        if averaged is None:
            return None
        ema, classes, worst = averaged
        return EvalReport(val=raw.result, ema=ema, train=train, classes=classes, worst=worst)
