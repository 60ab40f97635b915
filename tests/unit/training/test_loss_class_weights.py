"""`train.class_weights`: what each class weighs, and that the loss is a mean over images however they are divided."""

import numpy as np
import pytest
import torch
from sklearn.utils.class_weight import compute_class_weight
from torch import Tensor
from torch.nn import functional

from paceline.core.dataset import ArraySource, DatasetInfo
from paceline.core.errors import RecipeError
from paceline.recipe.schema.train import Train
from paceline.training.loss import CrossEntropy, build_loss, compute_class_weights, describe_class_weights

CPU = torch.device("cpu")
COUNTS = (12, 3, 1)
NAMES = ("cat", "dog", "lynx")


def split(counts: tuple[int, ...] = COUNTS, names: tuple[str, ...] = NAMES) -> ArraySource:
    labels = np.repeat(np.arange(len(counts)), counts)
    info = DatasetInfo("made", "train", len(labels), names, 1, (2, 2), (0.5,), (0.5,))
    return ArraySource(info, np.zeros((len(labels), 2, 2, 1), dtype=np.uint8), labels)


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Return logits [16, 3], the labels of the split in another order, and soft targets [16, 3], all in float64."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.from_numpy(split().labels)[torch.randperm(16, generator=generator)]
    logits = torch.randn(16, 3, dtype=torch.float64, generator=generator)
    return logits, labels, torch.rand(16, 3, dtype=torch.float64, generator=generator).softmax(1)


def weights() -> Tensor:
    found = compute_class_weights("balanced", split())
    assert found is not None
    return torch.from_numpy(found)


def test_balanced_weights_are_those_of_scikit_learn() -> None:
    source = split()
    theirs = compute_class_weight("balanced", classes=np.arange(3), y=source.labels)
    assert weights().tolist() == pytest.approx(theirs.tolist(), rel=1e-15)


def test_a_class_without_images_takes_nothing_from_the_others() -> None:
    found = compute_class_weights("balanced", split((12, 0, 1, 3), (*NAMES, "owl")))
    assert found is not None and found[1] == 1.0
    assert found[[0, 3, 2]].tolist() == pytest.approx(weights().tolist(), rel=1e-15)


@pytest.mark.parametrize("setting", ["balanced", {"lynx": 4.0}, {"cat": 0.1, "dog": 7.0, "lynx": 1.0}])
def test_the_mean_over_the_training_images_is_1(setting) -> None:
    source = split()
    found = compute_class_weights(setting, source)
    assert found is not None
    assert found[source.labels].mean() == pytest.approx(1, rel=1e-15)


def test_weights_by_name_keep_their_ratios_and_others_are_1() -> None:
    found = compute_class_weights({"dog": 3.0, "lynx": 6.0}, split())
    assert found is not None
    assert (found / found[0]).tolist() == pytest.approx([1, 3, 6], rel=1e-15)


def test_the_note_has_the_rarest_and_the_most_frequent_class() -> None:
    found = compute_class_weights("balanced", split())
    assert found is not None
    told = "train.class_weights: from 0.444 (cat) to 5.33 (lynx), with a mean of 1 over the training images"
    assert describe_class_weights(found, NAMES) == told


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"lynks": 2.0}, "'lynks' is not a class of the dataset (did you mean 'lynx'?)"),
        ({"cat": 2.0, "zebra": 2.0}, "'zebra' is not a class of the dataset (name some of cat, dog, lynx)"),
    ],
)
def test_a_name_that_no_class_has_is_refused(setting, message) -> None:
    with pytest.raises(RecipeError) as caught:
        compute_class_weights(setting, split())
    assert str(caught.value) == f"train.class_weights: {message}"


def test_labels_that_come_with_their_images_only_cannot_be_counted() -> None:
    class UnlabelledSource:
        info = split().info

    with pytest.raises(RecipeError, match=r"^train.class_weights: made has no labels apart from its images.*\(set "):
        compute_class_weights("balanced", UnlabelledSource())  # type: ignore[arg-type]


def test_an_image_counts_by_the_weight_of_its_label() -> None:
    logits, labels, _ = batch()
    each = functional.cross_entropy(logits, labels, reduction="none")
    expected = sum(weights()[label] * loss for label, loss in zip(labels, each, strict=True)) / len(labels)
    torch.testing.assert_close(CrossEntropy(0.0, weights())(logits, labels), expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_each_share_of_a_target_counts_by_the_weight_of_its_class(smoothing: float) -> None:
    logits, labels, soft = batch()
    for targets, shares in ((soft, soft), (labels, functional.one_hot(labels, 3).double())):
        smooth = shares * (1 - smoothing) + smoothing / 3
        expected = -(smooth * weights() * logits.log_softmax(1)).sum(1).mean()
        torch.testing.assert_close(CrossEntropy(smoothing, weights())(logits, targets), expected, rtol=1e-14, atol=0)


def test_a_batch_is_the_mean_of_its_parts_for_any_classes() -> None:
    """Torch's own mean divides by the weights of the part, so that a part of cats alone counts as much as any."""
    logits, labels, _ = batch()
    order = labels.argsort()
    logits, labels = logits[order], labels[order]
    criterion = CrossEntropy(0.1, weights())
    parts = [criterion(*part) for part in zip(logits.chunk(4), labels.chunk(4), strict=True)]
    torch.testing.assert_close(torch.stack(parts).mean(), criterion(logits, labels), rtol=1e-14, atol=0)
    theirs = [
        functional.cross_entropy(some, of, weights()) for some, of in zip(logits.chunk(4), labels.chunk(4), strict=True)
    ]
    assert abs(torch.stack(theirs).mean() - functional.cross_entropy(logits, labels, weights())) > 0.01


def test_logits_of_16_bits_are_weighted_in_32() -> None:
    logits, labels, _ = batch()
    half = logits.bfloat16()
    loss = CrossEntropy(0.0, weights())(half, labels)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, CrossEntropy(0.0, weights())(half.float(), labels), rtol=0, atol=0)


def test_without_weights_the_loss_is_plain_and_has_no_note() -> None:
    logits, labels, _ = batch()
    criterion, told = build_loss(Train(epochs=1, label_smoothing=0.1), split(), CPU)
    assert told == ""
    assert torch.equal(criterion(logits, labels), functional.cross_entropy(logits, labels, label_smoothing=0.1))


def test_the_loss_of_a_recipe_is_weighted_and_smoothed() -> None:
    logits, labels, _ = batch()
    criterion, told = build_loss(Train(epochs=1, label_smoothing=0.1, class_weights="balanced"), split(), CPU)
    assert told.startswith("train.class_weights: from 0.444 (cat)")
    assert torch.equal(criterion(logits, labels), CrossEntropy(0.1, weights())(logits, labels))
