"""The likeliest classes come first, and every image gets its answer."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from paceline.core.errors import RecipeError
from paceline.inference.images import UnreadableImage
from paceline.inference.predict import Guess, InputImage, predict_images, rank_classes
from paceline.training.metrics import predict_batch

CLASSES = tuple("abcdefgh")


class Echo:
    """A network that finds the class whose number is the pixel's value, and keeps the sizes of its batches."""

    classes = CLASSES
    threshold = None

    def __init__(self) -> None:
        self.batches: list[int] = []

    def log_probabilities(self, images: torch.Tensor) -> torch.Tensor:
        self.batches.append(len(images))
        return (4.0 * torch.eye(len(CLASSES), dtype=torch.float64))[images.flatten().long()].log_softmax(dim=1)


def picture(number: int) -> InputImage:
    return InputImage(Path(f"{number}.jpg"), torch.full((1, 1, 1), number, dtype=torch.uint8))


def test_guesses_are_the_likeliest_classes_in_order() -> None:
    shares = torch.tensor([[0.1, 0.6, 0.3], [0.5, 0.2, 0.3]], dtype=torch.float64)
    found = rank_classes(shares.log(), "abc", 2)
    assert [[guess.name for guess in row] for row in found] == [["b", "c"], ["a", "c"]]
    assert [guess.probability for guess in found[0]] == pytest.approx([0.6, 0.3])


def test_at_most_all_classes_are_ranked() -> None:
    assert len(rank_classes(torch.zeros(1, 3), "abc", 9)[0]) == 3


@pytest.mark.parametrize("top", [1, 2, 5, 7, 8])
def test_among_equals_the_first_is_the_one_that_evaluation_counts(top: int) -> None:
    logits = torch.randint(3, (500, 8), generator=torch.Generator().manual_seed(0)).bfloat16()
    counted = predict_batch(logits, torch.zeros(500, dtype=torch.int64)).predicted
    found = rank_classes(logits.double().log_softmax(dim=1), CLASSES, top)
    assert [row[0].name for row in found] == [CLASSES[number] for number in counted.tolist()]
    assert all(len({guess.name for guess in row}) == top for row in found)
    assert all(first.probability >= next_.probability for row in found for first, next_ in pairwise(row))


@pytest.mark.parametrize("batch_size", [1, 2, 3, 100])
def test_every_image_gets_its_answer_in_its_place(batch_size: int) -> None:
    network, bad = Echo(), UnreadableImage(Path("bad.jpg"), "is no image")
    found = list(predict_images(network, [picture(3), bad, picture(0), picture(7), bad], batch_size=batch_size, top=1))
    assert [each.path.name for each in found] == ["3.jpg", "bad.jpg", "0.jpg", "7.jpg", "bad.jpg"]
    assert [each.guesses[0].name for each in found if not isinstance(each, UnreadableImage)] == ["d", "a", "h"]
    assert max(network.batches) == min(batch_size, 3) and sum(network.batches) == 3


def test_answers_come_as_soon_as_a_batch_is_full() -> None:
    pictures = iter([picture(1), picture(2), picture(3)])
    found = predict_images(Echo(), pictures, batch_size=2, top=1)
    assert next(found).guesses == (Guess("b", pytest.approx(0.886, abs=1e-3)),)  # e^4 / (e^4 + 7)
    assert next(pictures).path.name == "3.jpg"


def test_an_unreadable_image_is_reported_before_the_next_is_read() -> None:
    bad = [UnreadableImage(Path(f"{number}.jpg"), "is no image") for number in range(40)]
    pictures = iter([bad[0], picture(1), *bad[1:], picture(2)])
    found = predict_images(Echo(), pictures, batch_size=2, top=1)
    assert next(found) is bad[0]
    assert [next(found).path.name for _ in range(16)] == ["1.jpg", *(f"{number}.jpg" for number in range(1, 16))]
    assert next(pictures) is bad[16]  # of a long stretch, no more than eight batches wait for the network


def test_nan_logits_are_reported_and_the_other_images_ranked() -> None:
    network = Echo()
    echoed = network.log_probabilities

    def answer(images: torch.Tensor) -> torch.Tensor:
        found = echoed(images)
        found[1] = torch.nan
        return found

    network.log_probabilities = answer
    found = list(predict_images(network, [picture(1), picture(2), picture(3)], batch_size=3, top=2))
    assert [isinstance(each, UnreadableImage) for each in found] == [False, True, False]
    assert found[1] == UnreadableImage(Path("2.jpg"), "its logits are NaN; use another --checkpoint")
    assert [found[index].guesses[0].name for index in (0, 2)] == ["b", "d"]


@pytest.mark.parametrize(("number", "fix"), [(1, "use --device cpu"), (7, "try 3")])
def test_a_batch_that_does_not_fit_is_a_one_line_error(number: int, fix: str) -> None:
    def full(images: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. " * 20)

    network = Echo()
    network.log_probabilities = full
    with pytest.raises(RecipeError, match=rf"^--batch-size: {number}: .* do not fit into GPU memory \({fix}\)$"):
        list(predict_images(network, [picture(1)] * number, batch_size=9, top=1))


def test_a_class_whose_name_cannot_be_printed_is_written_out() -> None:
    network = Echo()
    network.classes = (*CLASSES[:-1], "caf\udce9")
    (found,) = predict_images(network, [picture(7)], batch_size=1, top=1)
    assert found.guesses[0].name == "caf\\udce9"
