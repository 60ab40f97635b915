"""Metrics by name, which of two values is better, and averages over classes as scikit-learn's."""

import math

import numpy as np
import pytest
from sklearn.metrics import precision_recall_fscore_support

from paceline.core.metric import (
    Monitor,
    better_than_last,
    class_averages,
    describe_monitored,
    format_metric,
    metric_label,
    top_k,
    value_of,
    weighted_mean,
)
from paceline.core.results import ClassCount, ClassTable, EvalResult, RunResult, classes_csv, read_classes_csv


def result(top1: float = 0.5, loss: float = 1.0, **metrics: float) -> EvalResult:
    return EvalResult(images=8, top1=top1, top5=1.0, loss=loss, metrics=metrics or None)


def counted(labels: np.ndarray, predicted: np.ndarray, num_classes: int) -> list[ClassCount]:
    rows = ((labels == each, predicted == each) for each in range(num_classes))
    return [
        ClassCount(str(number), int(true.sum()), int((true & said).sum()), int(said.sum()))
        for number, (true, said) in enumerate(rows)
    ]


@pytest.mark.parametrize("num_classes", [2, 3, 7])
def test_averages_are_scikit_learns(num_classes: int) -> None:
    draws = np.random.default_rng(num_classes)
    labels = (draws.random(200) ** 2 * (num_classes - 1)).astype(int)  # the last class has no image
    predicted = np.where(draws.random(200) < 0.6, labels, draws.integers(0, num_classes, 200))
    averages = class_averages(counted(labels, predicted, num_classes))
    for average, prefix in (("macro", ""), ("weighted", "weighted_")):
        theirs = precision_recall_fscore_support(
            labels, predicted, labels=np.unique(labels), average=average, zero_division=0
        )
        ours = [averages[f"{prefix}{name}"] for name in ("precision", "recall", "f1")]
        assert ours == pytest.approx(list(theirs[:3]), rel=1e-12)
    assert len(averages) == 6


def test_a_class_that_is_never_predicted_has_a_precision_of_0() -> None:
    assert class_averages([ClassCount("a", 4, 4, 8), ClassCount("b", 4, 0, 0)])["precision"] == 0.25


def test_without_counts_of_predictions_there_are_no_averages() -> None:
    assert class_averages([ClassCount("a", 4, 4)]) == {} == class_averages([])


def test_a_mean_leaves_out_what_is_undefined() -> None:
    assert weighted_mean([0.5, math.nan, 1.0], [1, 5, 3]) == 0.875
    assert math.isnan(weighted_mean([math.nan], [1]))


@pytest.mark.parametrize(
    ("name", "is_minimized", "new", "best", "better"),
    [
        ("top1", False, result(0.6), result(0.5), True),
        ("top1", False, result(0.5), result(0.5), False),
        ("loss", True, result(loss=0.9), result(loss=1.0), True),
        ("loss", True, result(loss=1.1), result(loss=1.0), False),
        ("loss", True, result(loss=math.nan), result(loss=1.0), False),
        ("loss", True, result(loss=1.0), result(loss=math.nan), True),
        ("auroc", False, result(auroc=0.9), result(auroc=0.8), True),
        ("auroc", False, result(), result(auroc=0.8), False),
        ("auroc", False, result(auroc=math.nan), None, True),
    ],
)
def test_what_is_better(name: str, is_minimized: bool, new: EvalResult, best: EvalResult | None, better: bool) -> None:
    assert Monitor(name, is_minimized=is_minimized).is_better(new, best) is better


def test_names_and_values_for_display() -> None:
    assert [top_k(name) for name in ("top1", "top10", "top0", "top1000", "loss")] == [1, 10, None, None, None]
    names = ("top3", "f1", "mean_class_accuracy", "weighted_auroc", "weighted_recall", "my.module:cost_of_errors")
    labels = ["top-3", "F1", "balanced accuracy", "weighted AUROC", "weighted recall", "cost of errors"]
    assert [metric_label(name) for name in names] == labels
    assert (format_metric("top3", 0.5), format_metric("f1", 0.5)) == ("50.00 %", "0.5000")
    assert value_of(result(), "top1") == 0.5 and math.isnan(value_of(result(), "ece"))


def test_classes_with_predictions_and_scores_are_read_back() -> None:
    classes = (ClassCount("a", 4, 2, 3, 0.75, 0.5), ClassCount("b", 2, 1, 0, 1.0, 1.0))
    text = classes_csv(ClassTable(classes))
    assert text.splitlines()[0] == "class,images,correct,accuracy,predicted,precision,f1,auroc,ap"
    assert text.splitlines()[2] == "b,2,1,0.5,0,,1.0,1.0,1.0"
    assert read_classes_csv(text) == classes


def test_a_row_has_the_metrics_by_their_names() -> None:
    assert result(f1=math.nan).to_row() == {
        "images": 8, "top1": 0.5, "top5": 1.0, "loss": 1.0, "ece": None, "mean_class_accuracy": None, "f1": "nan"
    }  # fmt: skip
    assert "metrics" not in result().to_row()


def ended(best: EvalResult | None, last: EvalResult, monitor: str = "loss", minimized: bool | None = None) -> RunResult:
    return RunResult.model_construct(eval=last, best=best, monitor=monitor, is_monitor_minimized=minimized)


@pytest.mark.parametrize(
    ("best", "last", "monitor", "minimized", "shown"),
    [
        (result(loss=0.35), result(loss=0.30), "loss", True, ""),  # the last came after the time was up
        (result(loss=0.30), result(loss=0.35), "loss", True, "0.3000"),
        (result(loss=0.30), result(loss=0.35), "loss", None, "0.3000"),
        (result(auroc=math.nan), result(auroc=math.nan), "auroc", False, ""),
        (result(auroc=0.5), result(auroc=math.nan), "auroc", False, "0.5000"),
        (result(**{"m:cost": 2.0}), result(**{"m:cost": 1.0}), "m:cost", True, ""),
        (result(**{"m:cost": 2.0}), result(**{"m:cost": 1.0}), "m:cost", False, "2.0000"),
        (None, result(loss=0.35), "loss", True, ""),
    ],
)
def test_the_best_is_shown_only_if_it_is_better_than_the_last(
    best: EvalResult | None, last: EvalResult, monitor: str, minimized: bool | None, shown: str
) -> None:
    described = describe_monitored(ended(best, last, monitor, minimized))
    assert described is not None and described[2] == shown
    assert better_than_last(ended(best, last, monitor, minimized)) is (best if shown else None)


def test_scikit_learn_counts_a_class_that_is_only_predicted_unless_labels_are_given() -> None:
    labels, predicted = np.array([0, 0, 1, 1]), np.array([0, 2, 1, 1])
    ours = class_averages(counted(labels, predicted, 3))["f1"]
    with_labels, without = (
        precision_recall_fscore_support(labels, predicted, labels=given, average="macro", zero_division=0)[2]
        for given in ([0, 1], None)
    )
    assert ours == pytest.approx(with_labels) and without < with_labels
