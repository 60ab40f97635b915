"""Evaluate the raw and averaged weights on the validation set, and the raw ones on training images."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from paceline.core.results import EvalReport
from paceline.train.average import WeightAverage
from paceline.train.evaluate import SplitEvaluation

EvaluateSplit = Callable[[nn.Module], SplitEvaluation | None]
"""None: a rank has to stop before the evaluation is complete."""


@dataclass(frozen=True)
class ModelEvaluator:
    """Run `evaluate_val` on the raw and the averaged weights, and `evaluate_train` on the raw ones.

    Per-class tables and worst mistakes are those of `EvalReport.primary`.
    """

    evaluate_val: EvaluateSplit
    average: WeightAverage
    evaluate_train: EvaluateSplit | None = None

    def __call__(self, model: nn.Module) -> EvalReport | None:
        """Return the report on `model`, whose weights are restored afterwards, or None if a rank has to stop early.
        Collective.
        """
        raw = self.evaluate_val(model)
        trained = self.evaluate_train(model) if raw and self.evaluate_train else None
        if raw is None or (self.evaluate_train and trained is None):
            return None
        train = trained and trained.result
        if not self.average.is_enabled:
            return EvalReport(val=raw.result, train=train, classes=raw.classes, worst=raw.worst)
        with self.average.swapped():
            averaged = self.evaluate_val(model)
        if averaged is None:
            return None
        ema, classes, worst = averaged
        return EvalReport(val=raw.result, ema=ema, train=train, classes=classes, worst=worst)
