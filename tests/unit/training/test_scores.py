"""Metrics of scores: scikit-learn's, equal on any number of ranks, undefined where they are, and one's own."""

import math
import sys
from functools import partial
from types import ModuleType

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, roc_auc_score
from torch import Tensor

from paceline.core.errors import RecipeError
from paceline.core.results import ClassCount
from paceline.parallel.strategy import SingleDevice
from paceline.recipe.load import Patch, load
from paceline.training.scores import ExtraMetrics, ImageScores, ScoreCollector, build_monitor

CPU = torch.device("cpu")
N, K = 120, 4


def made(num_classes: int = K, num_images: int = N) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_classes)
    labels = torch.randint(num_classes, (num_images,), generator=generator)
    logits = torch.randn(num_images, num_classes, generator=generator)
    logits[torch.arange(num_images), labels] += 1
    return logits.mul(4).round().div(4), labels  # with ties


def collected(logits: Tensor, labels: Tensor, order: Tensor, batch: int = 7) -> ImageScores:
    collector = ScoreCollector()
    for part in order.split(batch):
        collector.add(logits[part], labels[part], part.numpy())
    scores = collector.gather(SingleDevice(), logits.shape[1], CPU)
    assert scores is not None
    return scores


def classes_of(labels: Tensor, num_classes: int = K) -> list[ClassCount]:
    return [ClassCount(str(each), int((labels == each).sum()), 0, 0) for each in range(num_classes)]


def extra(*overrides: str) -> ExtraMetrics:
    return ExtraMetrics.from_recipe(load("digits", Patch.parse([*overrides])).recipe)


def test_scores_are_in_the_order_of_their_index_whatever_the_batches() -> None:
    logits, labels = made()
    shuffled = torch.randperm(N, generator=torch.Generator().manual_seed(1))
    one, other = collected(logits, labels, torch.arange(N), 50), collected(logits, labels, shuffled)
    assert torch.equal(one.scores, other.scores) and torch.equal(one.labels, other.labels)
    assert torch.equal(one.labels, labels) and one.scores.dtype == torch.float32
    torch.testing.assert_close(one.scores, logits.softmax(1))


@pytest.mark.parametrize("num_classes", [2, K])
def test_auroc_and_ap_are_scikit_learns(num_classes: int) -> None:
    logits, labels = made(num_classes)
    images = collected(logits, labels, torch.arange(N))
    metrics = extra("train.metrics=[auroc,ap,weighted_auroc,weighted_ap]")
    values, classes = metrics.measure(classes_of(labels, num_classes), [], images)
    truth, scores = np.eye(num_classes)[labels], images.scores.numpy()
    for average, prefix in (("macro", ""), ("weighted", "weighted_")):
        ours = [values[f"{prefix}auroc"], values[f"{prefix}ap"]]
        theirs = [function(truth, scores, average=average) for function in (roc_auc_score, average_precision_score)]
        assert ours == pytest.approx(theirs, rel=1e-12)
    assert [each.auroc for each in classes] == pytest.approx(list(roc_auc_score(truth, scores, average=None)))


def test_a_class_without_images_has_no_auroc_and_does_not_count() -> None:
    logits, labels = made()
    labels = labels.where(labels != 2, 0)
    values, classes = extra("train.metrics=[auroc]").measure(
        classes_of(labels), [], collected(logits, labels, torch.arange(N))
    )
    assert math.isnan(classes[2].auroc) and values["auroc"] == pytest.approx(
        np.mean([each.auroc for each in classes if each.images])
    )


def test_scores_that_are_nan_have_no_auroc() -> None:
    logits, labels = made()
    logits[3] = torch.nan
    values, _ = extra("train.metrics=[auroc]").measure(
        classes_of(labels), [], collected(logits, labels, torch.arange(N))
    )
    assert math.isnan(values["auroc"])


def test_top_k_is_read_from_the_shares() -> None:
    metrics = extra("train.metrics=[top3,top20]")
    assert metrics.num_best == 20 and not metrics.needs_scores
    assert metrics.measure([], [0.25, 0.5, 0.75, 1.0], None)[0] == {"top3": 0.75, "top20": 1.0}


def cost(scores: Tensor, labels: Tensor) -> float:
    assert scores.shape == (N, K) and labels.dtype == torch.int64
    return float((scores.argmax(1) - labels).abs().sum())


cost.minimize = True  # type: ignore[attr-defined]


def broken(scores: Tensor, labels: Tensor) -> float:
    raise KeyError("weights")


@pytest.fixture(autouse=True)
def own_module(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("own_metrics")
    module.cost, module.broken, module.alone = cost, broken, lambda scores: 0.0  # type: ignore[attr-defined]
    module.cheap = partial(cost)  # type: ignore[attr-defined]
    module.dear = partial(cost)  # type: ignore[attr-defined]
    module.dear.minimize = False
    module.more = lambda scores, labels, weights: 0.0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "own_metrics", module)


def test_a_metric_of_ones_own_gets_all_scores_and_labels() -> None:
    logits, labels = made()
    metrics = extra("train.metrics=[own_metrics:cost]")
    values, _ = metrics.measure(classes_of(labels), [], collected(logits, labels, torch.arange(N)))
    assert values == {"own_metrics:cost": float((logits.argmax(1) - labels).abs().sum())}


def test_what_is_monitored_is_maximized_unless_it_says_otherwise() -> None:
    def monitor(name: str, default: str = "top1") -> tuple[str, bool]:
        built = build_monitor(load("digits", Patch.parse([f"train.monitor={name}"])).recipe, default)
        return built.name, built.is_minimized

    assert monitor("auto") == ("top1", False) and monitor("auto", "loss") == ("loss", True)
    assert monitor("f1") == ("f1", False) and monitor("ece") == ("ece", True)
    assert monitor("own_metrics:cost") == ("own_metrics:cost", True)
    assert monitor("own_metrics:broken") == ("own_metrics:broken", False)
    assert monitor("own_metrics:cheap") == ("own_metrics:cheap", True)
    assert monitor("own_metrics:dear") == ("own_metrics:dear", False)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("train.metrics=[f1,own_metrics:absent]", r"train.metrics\[1\]: own_metrics:absent: own_metrics has no absent"),
        ("train.monitor=own_metrics:alone", r"train.monitor: own_metrics:alone takes 1 of the 2 arguments of a metric"),
        ("train.metrics=[own_metrics:more]", r"train.metrics\[0\]: own_metrics:more needs weights, which is not given"),
        ("train.metrics=[nowhere:f]", r"train.metrics\[0\]: nowhere:f: there is no module nowhere"),
    ],
)
def test_a_metric_that_does_not_fit_is_an_error_of_one_line(field: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        extra(field)
    assert "\n" not in str(caught.value)


def test_a_metric_that_raises_is_an_error_with_its_place() -> None:
    logits, labels = made()
    with pytest.raises(RecipeError, match=r"own_metrics:broken raised KeyError: 'weights' at .*test_scores.py:\d+"):
        extra("train.metrics=[own_metrics:broken]").measure(
            classes_of(labels), [], collected(logits, labels, torch.arange(N))
        )


@pytest.mark.parametrize("has_images", [True, False])
def test_progress_is_counted_after_each_class_and_metric_on_all_ranks(has_images: bool) -> None:
    """Other ranks than 0 have no images, and count along."""
    logits, labels = made()
    images, counts = collected(logits, labels, torch.arange(N)) if has_images else None, []
    for words, expected in (("auroc,own_metrics:cost", K + 1), ("own_metrics:cost", 1), ("f1,top3", 0)):
        counts.clear()
        metrics = extra(f"train.metrics=[{words}]")
        metrics.measure(classes_of(labels), [1.0] * 5, images, lambda: counts.append(1))
        assert len(counts) == expected
