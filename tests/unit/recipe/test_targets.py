"""Loss and metrics fit the labels of the dataset, or one line names the setting to change."""

import numpy as np
import pytest

from paceline.core.dataset import DatasetInfo, TargetTable
from paceline.core.errors import RecipeError
from paceline.recipe.schema.train import Train
from paceline.recipe.targets import check_targets, is_multi_label

SEVERAL = [[1, 1, 0], [0, 0, 1], [0, 0, 0]]
NONE = [[0, 0, 0], [0, 0, 1]]
SOFT = [[0.5, 0.5, 0], [0.333, 0.333, 0.334]]
UNEVEN = [[0.5, 0.9, 0], [0, 0, 1]]
SIGMOID = {"name": "focal", "activation": "sigmoid"}


def info(rows: list | None) -> DatasetInfo:
    targets = None if rows is None else TargetTable(np.array(rows, dtype=np.float32))
    return DatasetInfo("birds", "train", 9, ("a", "b", "c"), 3, None, (0.5,) * 3, (1.0,) * 3, targets=targets)


def check(rows: list | None, **fields: object) -> None:
    check_targets(Train.model_validate({"epochs": 1, **fields}), info(rows))


@pytest.mark.parametrize("loss", ["cross_entropy", "focal"])
def test_softmax_takes_soft_labels_that_sum_to_1(loss: str) -> None:
    for rows in (None, SOFT, [[0, 1, 0]]):
        check(rows, loss=loss, class_weights="balanced", label_smoothing=0.1, accuracy="on", metrics=["top3", "ece"])
    with pytest.raises(RecipeError, match=rf"^train.loss: {loss} .* birds has 2 labels \(set train.loss=bce\)$"):
        check(SEVERAL, loss=loss)
    with pytest.raises(RecipeError, match=rf"^train.loss: {loss} .* birds has no label \(set train.loss=bce\)$"):
        check(NONE, loss=loss)
    with pytest.raises(RecipeError, match=r"^train.loss: .* is 1.4 \(correct the shares, or set train.loss=bce\)$"):
        check(UNEVEN, loss=loss)


def test_the_default_loss_is_refused_for_several_labels() -> None:
    with pytest.raises(RecipeError, match=r"set train\.loss=bce"):
        check(SEVERAL)


@pytest.mark.parametrize("loss", ["bce", SIGMOID, {"name": "mypkg.losses:asymmetric"}])
def test_a_sigmoid_takes_any_targets(loss: object) -> None:
    for rows in (SEVERAL, NONE, UNEVEN):
        check(rows, loss=loss, monitor="hamming_loss", metrics=["subset_accuracy", "f1", "loss"], label_threshold=0.3)
        assert is_multi_label(Train.model_validate({"epochs": 1, "loss": loss}).loss, info(rows))
    assert not is_multi_label(Train.model_validate({"epochs": 1, "loss": loss}).loss, info(None))


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"metrics": ["top3"]}, "train.metrics: top3"),
        ({"metrics": ["f1"], "monitor": "ece"}, "train.monitor: ece"),
        ({"monitor": "mean_class_accuracy"}, "train.monitor: mean_class_accuracy"),
        ({"stop": {"top1": 0.9}}, "train.stop: it .*set train.stop=off"),
        ({"accuracy": "on"}, "train.accuracy: on .*set train.accuracy=off"),
        ({"class_weights": "balanced"}, "train.class_weights: balanced .*set train.class_weights=off"),
        ({"distill": {"teacher": "run"}}, "train.distill: it .*set train.distill=off"),
    ],
)
def test_what_needs_one_label_is_refused(fields: dict, problem: str) -> None:
    with pytest.raises(RecipeError, match=problem):
        check(SEVERAL, loss="bce", **fields)


@pytest.mark.parametrize("rows", [None, SOFT])
def test_what_needs_several_labels_is_refused(rows: list | None) -> None:
    with pytest.raises(RecipeError, match=r"^train.label_threshold: 0.3 .*leave it out"):
        check(rows, label_threshold=0.3)
    with pytest.raises(RecipeError, match=r"^train.metrics: hamming_loss .*leave it out"):
        check(rows, metrics=["hamming_loss"])
    with pytest.raises(RecipeError, match=r"^train.monitor: micro_f1 .*leave it out"):
        check(rows, monitor="micro_f1")
