"""What an evaluation counts: the same numbers as scikit-learn's, and parts that add up to the whole."""

import itertools
import math

import numpy as np
import pytest
import torch
from sklearn.metrics import balanced_accuracy_score, confusion_matrix, log_loss, top_k_accuracy_score
from torch import Tensor

from paceline.training.metrics import MAX_CONFUSION_CLASSES, NUM_BINS, EvalCounts, predict_batch

CPU = torch.device("cpu")
NAMES = tuple("abcdefg")


def made(num_images: int, num_classes: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return logits that are right more often than not, some of them very sure, and unevenly frequent labels."""
    generator = torch.Generator().manual_seed(seed)
    labels = (torch.rand(num_images, generator=generator) ** 2 * num_classes).long()
    logits = torch.randn(num_images, num_classes, generator=generator) * 3
    logits[torch.arange(num_images), labels] += 2
    return logits, labels


def counted(logits: Tensor, labels: Tensor, batch: int = 16) -> EvalCounts:
    tally = EvalCounts.zeros(logits.shape[1], CPU)
    for part, truth in zip(logits.split(batch), labels.split(batch), strict=True):
        tally.add(predict_batch(part, truth))
    return tally


def reference_calibration(logits: Tensor, labels: Tensor) -> float:
    """Sort the images into 15 bins one by one, as Guo et al. 2017 (arXiv 1706.04599) put it in equations 2 and 3."""
    bins: list[list[tuple[float, bool]]] = [[] for _ in range(15)]
    for row, label in zip(logits.double().numpy(), labels.tolist(), strict=True):
        shares = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
        number = next(number for number in range(15) if number / 15 < shares.max() <= (number + 1) / 15)
        bins[number].append((shares.max(), shares.argmax() == label))
    filled = [np.array(each, dtype=float) for each in bins if each]
    assert len(filled) > 5
    return sum(len(each) / len(labels) * abs(each[:, 1].mean() - each[:, 0].mean()) for each in filled)


@pytest.mark.parametrize("num_classes", [2, 3, 7])
@pytest.mark.parametrize("batch", [1, 16, 500])
def test_the_numbers_are_scikit_learns(num_classes: int, batch: int) -> None:
    logits, labels = made(500, num_classes)
    tally = counted(logits, labels, batch)
    result, predicted = tally.to_result(), logits.argmax(1)
    assert result.images == 500
    assert tally.confusion.tolist() == confusion_matrix(labels, predicted).tolist()
    assert result.top1 == (predicted == labels).sum().item() / 500
    # The others sum in another order: a few of float64's last bits.
    assert result.mean_class_accuracy == pytest.approx(balanced_accuracy_score(labels, predicted), rel=1e-12)
    shares = logits.double().softmax(1).numpy()
    assert result.loss == pytest.approx(log_loss(labels, shares, labels=range(num_classes)), rel=1e-12)
    assert result.ece == pytest.approx(reference_calibration(logits, labels), rel=1e-9)


def test_top_5_is_scikit_learns() -> None:
    logits, labels = made(500, 7)
    expected = top_k_accuracy_score(labels, logits.numpy(), k=5)
    assert counted(logits, labels).to_result().top5 == pytest.approx(expected, rel=1e-15) and expected < 1


def test_with_fewer_than_five_classes_top_5_is_all_of_them() -> None:
    assert counted(*made(50, 3)).to_result().top5 == 1.0


@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_parts_of_a_set_add_up_to_the_whole(world_size: int) -> None:
    logits, labels = made(359, 7)
    bounds = [rank * 359 // world_size for rank in range(world_size + 1)]
    parts = [counted(logits[first:stop], labels[first:stop]) for first, stop in itertools.pairwise(bounds)]
    names = iter(("scores", "bins", "classes", "confusion"))

    def total(mine: Tensor) -> Tensor:
        name = next(names)
        assert mine is getattr(parts[0], name)
        return torch.stack([getattr(part, name) for part in parts]).sum(0)

    summed, whole = parts[0].reduce(total), counted(logits, labels)
    assert torch.equal(summed.confusion, whole.confusion) and torch.equal(summed.classes, whole.classes)
    assert torch.equal(summed.bins[[0, 2]], whole.bins[[0, 2]]) and torch.equal(summed.scores[:3], whole.scores[:3])
    assert summed.to_result().ece == pytest.approx(whole.to_result().ece, rel=1e-12)  # float64 sums in another order
    assert summed.to_result().loss == pytest.approx(whole.to_result().loss, rel=1e-12)


def test_a_part_without_images_changes_nothing() -> None:
    whole, empty = counted(*made(50, 7)), EvalCounts.zeros(7, CPU)
    pairs = {id(getattr(whole, name)): getattr(empty, name) for name in ("scores", "bins", "classes", "confusion")}
    assert whole.reduce(lambda mine: mine + pairs[id(mine)]).to_result() == whole.to_result()


def test_the_confusion_matrix_has_true_classes_in_rows() -> None:
    tally = counted(torch.tensor([[0.0, 9.0, 0.0], [0.0, 9.0, 0.0]]), torch.tensor([2, 1]))
    assert tally.confusion.tolist() == [[0, 0, 0], [0, 1, 0], [0, 1, 0]]


def test_the_counts_of_the_classes_are_rows_and_diagonal_of_the_confusion_matrix() -> None:
    table = counted(*made(500, 7)).to_class_table(NAMES)
    assert tuple(each.name for each in table.classes) == NAMES
    assert [each.images for each in table.classes] == [sum(row) for row in table.confusion]
    assert [each.correct for each in table.classes] == [row[number] for number, row in enumerate(table.confusion)]


def test_classes_without_images_do_not_count_in_the_mean_over_classes() -> None:
    tally = counted(torch.tensor([[9.0, 0, 0], [9.0, 0, 0], [9.0, 0, 0]]), torch.tensor([0, 0, 2]))
    assert tally.to_result().mean_class_accuracy == 0.5


def test_too_many_classes_keep_their_counts_but_no_confusion_matrix() -> None:
    num_classes = MAX_CONFUSION_CLASSES + 1
    logits, labels = made(100, num_classes)
    logits[range(40), labels[:40]] += 100
    tally = counted(logits, labels)
    assert tally.confusion.numel() == 0 and tally.to_class_table([""] * num_classes).confusion == ()
    assert tally.classes.sum(dim=1).tolist() == [100, 40, 100] and tally.to_result().top1 == 0.4


def test_a_confident_correct_model_is_calibrated_and_a_wrong_one_is_not() -> None:
    sure = torch.eye(3) * 1000
    assert counted(sure, torch.tensor([0, 1, 2])).to_result().ece == 0.0
    assert counted(sure, torch.tensor([1, 2, 0])).to_result().ece == 1.0


def test_a_uniform_model_is_calibrated() -> None:
    """Every share is 1/3 and one label in three is the first: the error is what float64 makes of 1/3."""
    result = counted(torch.zeros(9, 3), torch.arange(9) % 3).to_result()
    assert result.ece == pytest.approx(0.0, abs=1e-15)
    assert result.loss == pytest.approx(math.log(3), rel=1e-15)


def test_logits_that_are_no_numbers_make_a_loss_and_a_calibration_error_that_are_none() -> None:
    logits, labels = made(20, 7)
    logits[3] = math.nan
    result = counted(logits, labels).to_result()
    assert result.images == 20 and math.isnan(result.loss) and result.ece is not None and math.isnan(result.ece)


def test_half_precision_logits_are_summed_in_double() -> None:
    logits, labels = made(100, 7)
    assert counted(logits.bfloat16(), labels).to_result() == counted(logits.bfloat16().double(), labels).to_result()


def test_the_recorded_bins_give_the_calibration_error() -> None:
    tally = counted(*made(500, 7))
    bins = tally.to_class_table(NAMES).calibration
    assert [each.low for each in bins[1:]] == [each.high for each in bins[:-1]] and len(bins) == NUM_BINS
    assert sum(each.images for each in bins) == 500
    error = sum(abs(each.correct - each.confidence * each.images) for each in bins) / 500
    assert error == pytest.approx(tally.to_result().ece, rel=1e-12)
    assert all(each.low < each.confidence <= each.high for each in bins if each.images)


def test_naming_a_top_k_does_not_change_the_other_metrics_if_logits_tie() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(512, 100, generator=generator).round().bfloat16()
    labels = torch.randint(100, (512,), generator=generator)
    plain, more = predict_batch(logits, labels), predict_batch(logits, labels, 20)
    assert torch.equal(more.predicted, plain.predicted) and torch.equal(more.confidence, plain.confidence)
    assert more.hits.shape == (512, 20) and torch.equal(more.hits[:, :5], plain.hits)
    assert more.hits.sum(dim=1).max() == 1, "a label has one place"
    assert predict_batch(logits[:, :7], labels % 7, 20).hits.sum(dim=1).tolist() == [1] * 512
