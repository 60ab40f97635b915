"""The progress of a run, and its round trip through a checkpoint."""

import json

import pytest

from paceline.core.results import ClassCount, ClassTable, EvalReport, EvalResult
from paceline.training.state import TrainState


def result_of(top1: float, loss: float = 1.0) -> EvalResult:
    return EvalResult(images=8, top1=top1, top5=1.0, loss=loss, ece=0.125, mean_class_accuracy=0.5)


def test_a_state_survives_json() -> None:
    state = TrainState(step=7, skipped=2, images_seen=84, hits=1, trained_s=1.5, target_s=1.25, loss_sum=3.5)
    state.record_evaluation(EvalReport(val=result_of(0.5), ema=result_of(0.625), train=result_of(0.75)))
    assert TrainState.from_dict(json.loads(json.dumps(state.to_dict(), allow_nan=False))) == state


def test_a_state_before_any_evaluation_survives_json() -> None:
    assert TrainState.from_dict(json.loads(json.dumps(TrainState().to_dict()))) == TrainState()


@pytest.mark.parametrize("loss", [float("inf"), float("-inf")])
def test_a_loss_that_is_no_number_survives_strict_json(loss: float) -> None:
    state = TrainState()
    state.record_evaluation(EvalReport(val=result_of(0.5, loss)))
    assert TrainState.from_dict(json.loads(json.dumps(state.to_dict(), allow_nan=False))) == state


def test_the_classes_of_an_evaluation_are_not_saved() -> None:
    state = TrainState()
    state.record_evaluation(EvalReport(val=result_of(0.5), classes=ClassTable((ClassCount("a", 8, 4),))))
    read = TrainState.from_dict(state.to_dict())
    assert read.last == EvalReport(val=result_of(0.5))


def test_skipped_steps_are_no_updates() -> None:
    state = TrainState()
    for number in range(5):
        state.skipped += number in (1, 3)
        state.advance(12)
    assert (state.step, state.skipped, state.num_updates, state.images_seen) == (5, 2, 3, 60)


def test_the_best_is_of_the_evaluated_weights_and_the_first_of_equals() -> None:
    state = TrainState()
    for raw, averaged in [(0.5, 0.25), (0.9, 0.75), (0.1, 0.75), (0.95, 0.5)]:
        state.advance(1)
        state.record_evaluation(EvalReport(val=result_of(raw), ema=result_of(averaged)))
    assert (state.best, state.best_step, state.last_step) == (result_of(0.75), 2, 4)
    assert state.last is not None and state.last.val == result_of(0.95)
