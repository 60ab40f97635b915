"""The worst misclassified images: the same ones in whatever parts, and in whatever order, the images are seen."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.core.results import MisclassifiedImage
from paceline.training.metrics import Predictions, WorstMistakes, predict_batch

CPU = torch.device("cpu")
NUM = 103


def made() -> Predictions:
    """Return what a model says that is mostly wrong, with many losses that are equal to the last bit."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(0, 3, (NUM, 4), generator=generator).double()
    return predict_batch(logits, torch.randint(0, 4, (NUM,), generator=generator))


def part(whole: Predictions, indices: np.ndarray) -> Predictions:
    return Predictions(*(each[torch.from_numpy(indices)] for each in whole))


def kept(whole: Predictions, batches: list[np.ndarray], number: int) -> WorstMistakes:
    mistakes = WorstMistakes.empty(number, CPU)
    for indices in batches:
        mistakes.add(part(whole, indices), indices)
    return mistakes


def reference_mistakes(whole: Predictions, number: int) -> tuple[MisclassifiedImage, ...]:
    """Sort all mistakes in Python by falling loss and rising index."""
    columns = (whole.labels, whole.predicted, whole.confidence, whole.losses)
    rows = zip(range(NUM), *(each.tolist() for each in columns), strict=True)
    wrong = [MisclassifiedImage(*row) for row in rows if row[1] != row[2]]
    return tuple(sorted(wrong, key=lambda each: (-each.loss, each.index))[:number])


@pytest.mark.parametrize("number", [1, 16, 100])
@pytest.mark.parametrize("batch", [1, 7, NUM])
def test_the_worst_are_those_of_the_highest_loss_and_of_equal_ones_the_first(number: int, batch: int) -> None:
    whole = made()
    indices = np.random.default_rng(0).permutation(NUM)
    batches = [indices[first : first + batch] for first in range(0, NUM, batch)]
    expected = reference_mistakes(whole, number)
    assert kept(whole, batches, number).to_mistakes() == expected
    assert len({each.loss for each in expected}) < max(2, len(expected))  # there are equals to put in order


@pytest.mark.parametrize("world_size", [1, 2, 3, 110])
def test_the_worst_over_the_ranks_are_those_of_one_rank(world_size: int) -> None:
    """With 110 ranks for 103 images some have none."""
    whole = made()
    bounds = [rank * NUM // world_size for rank in range(world_size + 1)]
    shares = [np.arange(first, stop) for first, stop in itertools.pairwise(bounds)]
    ranks = [kept(whole, [share[::2], share[1::2]], 16) for share in shares]
    shown: list[Tensor] = []
    for rank in ranks:
        rank.merge_ranks(lambda rows: (shown.append(rows), rows[None])[1])
    together = [rank.merge_ranks(lambda rows: torch.stack(shown)).to_mistakes() for rank in ranks]
    assert set(together) == {reference_mistakes(whole, 16)}


def test_fewer_mistakes_than_the_limit_are_all_returned() -> None:
    found = predict_batch(torch.eye(3).double() * 4, torch.tensor([0, 2, 2]))
    mistakes = WorstMistakes.empty(16, CPU)
    mistakes.add(found, np.array([10, 11, 12]))
    share, loss = math.exp(4) / (math.exp(4) + 2), math.log(math.exp(4) + 2)
    assert mistakes.to_mistakes() == (
        MisclassifiedImage(11, 2, 1, pytest.approx(share, rel=1e-15), pytest.approx(loss, rel=1e-15)),
    )


def test_non_finite_losses_are_excluded() -> None:
    logits = torch.tensor([[0.0, 1.0], [math.nan, 1.0], [-math.inf, 1.0], [0.0, 2.0]])
    mistakes = WorstMistakes.empty(4, CPU)
    mistakes.add(predict_batch(logits, torch.zeros(4, dtype=torch.int64)), np.arange(4))
    assert [each.index for each in mistakes.to_mistakes()] == [3, 0]
