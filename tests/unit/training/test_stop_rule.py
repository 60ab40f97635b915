"""Stopping once the target accuracy is reached."""

from paceline.core.results import EvalReport, EvalResult
from paceline.core.statistics import TargetCriterion
from paceline.training.state import TrainState


def evaluated(accuracies: list[float], patience: int) -> tuple[TrainState, bool]:
    target, state = TargetCriterion(0.85, patience), TrainState()
    for number, top1 in enumerate(accuracies):
        state.trained_s = float(number)
        state.record_evaluation(EvalReport(val=EvalResult(images=1, top1=top1, top5=1.0, loss=0.0)))
        state.count_hits(target)
    return state, target.is_reached(state.hits)


def test_the_target_must_be_met_in_a_row() -> None:
    assert evaluated([0.9, 0.8, 0.9], 2)[1] is False
    assert evaluated([0.8, 0.85, 0.85], 2)[1] is True


def test_the_time_to_target_is_that_of_the_evaluation_that_met_it() -> None:
    assert evaluated([0.8, 0.9, 0.9], 2)[0].target_s == 2.0
    assert evaluated([0.8, 0.9], 2)[0].target_s is None
