"""Evaluations of the raw weights, of their average, and on training images."""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from paceline.core.results import ClassCount, ClassTable, EvalResult, MisclassifiedImage
from paceline.training.evaluator import ModelEvaluator, SplitEvaluation


def evaluate(model: nn.Module) -> SplitEvaluation:
    """Return the model's bias as its accuracy, and how sure it was of its worst mistake."""
    top1 = model.bias.item()
    counts = ClassTable((ClassCount("a", 8, round(8 * top1)),))
    return SplitEvaluation(
        EvalResult(images=8, top1=top1, top5=1.0, loss=1.0), counts, (MisclassifiedImage(0, 1, 2, top1, 1.0),)
    )


def on_training_images(model: nn.Module) -> SplitEvaluation:
    """Return twice the model's bias as its accuracy."""
    result, counts, *_ = evaluate(model)
    return SplitEvaluation(
        result.model_copy(update={"top1": 2 * result.top1}), counts, (MisclassifiedImage(9, 9, 9, 1.0, 9.0),)
    )


class Fixed:
    """An average that is always 0.375."""

    def __init__(self, model: nn.Linear) -> None:
        self._bias = model.bias

    @contextlib.contextmanager
    def swapped(self) -> Iterator[None]:
        kept = self._bias.data.clone()
        self._bias.data.fill_(0.375)
        yield
        self._bias.data.copy_(kept)


def net() -> nn.Linear:
    model = nn.Linear(1, 1)
    nn.init.constant_(model.bias, 0.25)
    return model


def test_without_an_average_the_weights_as_they_are_decide() -> None:
    report = ModelEvaluator(evaluate, None)(net())
    assert (report.val.top1, report.ema, report.train, report.gap) == (0.25, None, None, None)
    assert report.primary == report.val
    assert report.classes == ClassTable((ClassCount("a", 8, 2),))
    assert [each.confidence for each in report.worst] == [0.25]


def test_averaged_weights_are_evaluated_too_and_are_primary() -> None:
    model = net()
    report = ModelEvaluator(evaluate, Fixed(model))(model)
    assert report.ema is not None and (report.val.top1, report.ema.top1) == (0.25, 0.375)
    assert report.primary == report.ema
    assert report.classes == ClassTable((ClassCount("a", 8, 3),))
    assert [each.confidence for each in report.worst] == [0.375]
    assert torch.equal(model.bias, torch.tensor([0.25]))


def test_training_images_use_the_raw_weights() -> None:
    model = net()
    report = ModelEvaluator(evaluate, Fixed(model), on_training_images)(model)
    assert report.train is not None and report.train.top1 == 0.5
    assert report.gap == 0.25
    assert [each.index for each in report.worst] == [0]


def test_stopping_before_the_averaged_weights_gives_no_report() -> None:
    model, answers = net(), iter((evaluate(net()), None))
    assert ModelEvaluator(lambda model: next(answers), Fixed(model))(model) is None


def test_the_worst_mistakes_are_no_part_of_the_record_of_an_evaluation() -> None:
    assert set(ModelEvaluator(evaluate, None)(net()).model_dump(mode="json")) == {"val", "ema", "train"}
