"""Stopping once the target accuracy is reached."""

from paceline.core.results import EvalResult
from paceline.recipe.schema.train import Stop
from paceline.training.state import TrainState, build_stop_rule


def evaluated(accuracies: list[float], patience: int) -> tuple[TrainState, bool]:
    rule, state = build_stop_rule(Stop(top1=0.85, patience=patience)), TrainState()
    for number, top1 in enumerate(accuracies):
        state.trained_s = float(number)
        rule.update(EvalResult(images=1, top1=top1, top5=1.0, loss=0.0), state)
    return state, rule.should_stop(state)


def test_the_target_must_be_met_in_a_row() -> None:
    assert evaluated([0.9, 0.8, 0.9], 2)[1] is False
    assert evaluated([0.8, 0.85, 0.85], 2)[1] is True


def test_the_time_to_target_is_that_of_the_evaluation_that_met_it() -> None:
    assert evaluated([0.8, 0.9, 0.9], 2)[0].target_s == 2.0
    assert evaluated([0.8, 0.9], 2)[0].target_s is None


def test_without_a_target_nothing_stops() -> None:
    rule, state = build_stop_rule("off"), TrainState()
    rule.update(EvalResult(images=1, top1=1.0, top5=1.0, loss=0.0), state)
    assert not rule.should_stop(state)
