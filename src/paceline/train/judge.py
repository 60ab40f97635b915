"""What the weights of the moment are worth: as they are, averaged, and on images they were trained on."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from paceline.core.results import EvalReport
from paceline.train.average import Average
from paceline.train.evaluate import Evaluation

Evaluate = Callable[[nn.Module], Evaluation | None]
"""None: the ranks leave before it is known."""


@dataclass(frozen=True)
class Judge:
    """Run `evaluator` on the weights and, where there are any, on the averaged ones; `train_evaluator` on the former.

    The classes and the worst mistakes that are reported are those of the judged weights (`EvalReport.judged`).
    """

    evaluator: Evaluate
    average: Average
    train_evaluator: Evaluate | None = None

    def __call__(self, model: nn.Module) -> EvalReport | None:
        """Return the report on `model`, whose weights are afterwards what they were. Every rank must call it.

        Return None when the ranks leave before it is complete.
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
