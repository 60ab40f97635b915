"""Evaluation metrics by name: the names, which of two values is better, and averages over classes."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from paceline.core.results import ClassCount, EvalResult, RunResult
from paceline.core.units import accuracy

ALWAYS: Final = ("top1", "top5", "loss", "ece", "mean_class_accuracy")
"""Metrics of every evaluation: fields of `EvalResult`. The others are in its `metrics`, if the recipe names them."""
COUNTED: Final = ("precision", "recall", "f1", "weighted_precision", "weighted_recall", "weighted_f1")
"""Averages over classes that need only counts: of classes with images equally, or weighted by their images."""
SCORED: Final = ("auroc", "weighted_auroc", "ap", "weighted_ap")
"""Averages over classes that need the score of every class for every image."""
ONLY_MULTI_LABEL: Final = ("micro_precision", "micro_recall", "micro_f1", "subset_accuracy", "hamming_loss")
"""Metrics of several labels per image: averages over all labels, and shares of images and of labels."""
MULTI_LABEL: Final = (*COUNTED, *SCORED, *ONLY_MULTI_LABEL)
"""Metrics of every evaluation of several labels per image, beside the loss."""
_IN_ONE_LINE: Final = ("ap", "f1", "subset_accuracy")
MINIMIZED: Final = frozenset({"loss", "ece", "hamming_loss"})
_TOP_K: Final = re.compile(r"top([1-9]\d{0,2})")
_LABELS: Final = {
    "ece": "ECE",
    "mean_class_accuracy": "balanced accuracy",
    "f1": "F1",
    "weighted_f1": "weighted F1",
    "auroc": "AUROC",
    "weighted_auroc": "weighted AUROC",
    "ap": "AP",
    "weighted_ap": "weighted AP",
    "micro_f1": "micro F1",
    "hamming_loss": "Hamming loss",
}


def top_k(name: str) -> int | None:
    """Return k of a metric `topK`, 1 to 999, else None."""
    match = _TOP_K.fullmatch(name)
    return int(match[1]) if match else None


def metric_label(name: str) -> str:
    """Return the name of a metric for display, such as `AUROC`; of your own, the function's name."""
    k = top_k(name)
    return f"top-{k}" if k else _LABELS.get(name) or name.rpartition(":")[2].replace("_", " ")


def format_metric(name: str, value: float) -> str:
    """Return a metric for display: accuracies in percent, others with four decimals."""
    return accuracy(value) if top_k(name) or name == "mean_class_accuracy" else f"{value:,.4f}"


def value_of(result: EvalResult, name: str) -> float:
    """Return the metric `name` of an evaluation; NaN if it was not measured."""
    value = getattr(result, name) if name in ALWAYS else (result.metrics or {}).get(name)
    return math.nan if value is None else value


def default_monitor(result: EvalResult) -> str:
    """Return the metric that sums up an evaluation: top-1, or the macro AP (mAP) with several labels per image."""
    return "ap" if math.isnan(result.top1) else "top1"


def describe_result(result: EvalResult, *, with_name: bool = True) -> str:
    """Return the metric that sums up an evaluation for display, such as `top-1 97.2 %`; top-1 without its name if not
    `with_name`."""
    name = default_monitor(result)
    value = format_metric(name, value_of(result, name))
    return f"{metric_label(name)} {value}" if with_name or name != "top1" else value


def describe_metrics(result: EvalResult, *, all_of_them: bool = False) -> list[str]:
    """Return the extra metrics of an evaluation for display; with several labels per image, some or `all_of_them`."""
    metrics = result.metrics or {}
    is_cut = math.isnan(result.top1) and not all_of_them
    shown = [name for name in metrics if not is_cut or name in _IN_ONE_LINE or ":" in name]
    return [f"{metric_label(name)} {format_metric(name, metrics[name])}" for name in shown]


@dataclass(frozen=True)
class Monitor:
    """The metric by which evaluations are compared. A value that is NaN is never better."""

    name: str = "top1"
    is_minimized: bool = False

    def value(self, result: EvalResult) -> float:
        """Return the metric of an evaluation."""
        return value_of(result, self.name)

    def is_better(self, new: EvalResult, best: EvalResult | None) -> bool:
        """Return whether `new` is strictly better than `best`; an evaluation is better than none, a number than NaN."""
        if best is None:
            return True
        one, other = self.value(new), self.value(best)
        if math.isnan(other):
            return not math.isnan(one)
        return one < other if self.is_minimized else one > other


def monitor_of(result: RunResult) -> Monitor:
    """Return the metric by which a run compared its evaluations."""
    name, is_minimized = result.monitor or "top1", result.is_monitor_minimized
    return Monitor(name, is_minimized=name in MINIMIZED if is_minimized is None else is_minimized)


def better_than_last(result: RunResult) -> EvalResult | None:
    """Return the best evaluation of a run if it is better than the last one, else None."""
    # The last one may be the better: after `train.max_time` it does not count as the best.
    last = result.ema or result.eval
    is_better = result.best is not None and last is not None and monitor_of(result).is_better(result.best, last)
    return result.best if is_better else None


def describe_monitored(result: RunResult) -> tuple[str, str, str] | None:
    """Return label, last value and best value ("" if it is not better) of the metric that a run monitored.

    None for top-1, which is always shown, and without an evaluation.
    """
    last, name, best = result.ema or result.eval, result.monitor or "top1", better_than_last(result)
    if last is None or name == "top1" or (name == default_monitor(last) and best is None):
        return None
    shown = "" if best is None else format_metric(name, value_of(best, name))
    return metric_label(name), format_metric(name, value_of(last, name)), shown


def class_averages(classes: Iterable[ClassCount]) -> dict[str, float]:
    """Return the metrics of `COUNTED` over the classes that have images; {} without counts of predictions.

    As scikit-learn's with `zero_division=0`, so that a class that is never predicted has a precision of 0, and with
    `labels` the classes that have images: without it, scikit-learn also counts a class that is only predicted.
    """
    nonempty = [each for each in classes if each.images]
    if not nonempty or any(each.predicted is None for each in nonempty):
        return {}
    of_classes = {
        "precision": [each.precision or 0.0 for each in nonempty],
        "recall": [each.accuracy for each in nonempty],
        "f1": [each.f1 or 0.0 for each in nonempty],
    }
    images = [each.images for each in nonempty]
    averages = {name: weighted_mean(values, [1] * len(values)) for name, values in of_classes.items()}
    return averages | {f"weighted_{name}": weighted_mean(values, images) for name, values in of_classes.items()}


def weighted_mean(values: Iterable[float], weights: Iterable[int]) -> float:
    """Return the mean of the values that are not NaN, by their weights; NaN if there is none."""
    pairs = [(value, weight) for value, weight in zip(values, weights, strict=True) if not math.isnan(value)]
    total = sum(weight for _, weight in pairs)
    # `fsum` rounds once, so the mean does not depend on the order of classes.
    return math.fsum(value * weight for value, weight in pairs) / total if total else math.nan
