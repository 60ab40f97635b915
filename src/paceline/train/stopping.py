"""When to stop before the end. Decided from numbers that are equal on all ranks, so all ranks decide alike."""

from typing import Protocol

from paceline.core.goal import Goal
from paceline.core.results import EvalResult
from paceline.recipe.schema.train import Stop
from paceline.train.state import TrainState


class StopRule(Protocol):
    """Say after each evaluation whether the run has what it wanted."""

    def judge(self, result: EvalResult, state: TrainState) -> None:
        """Take note of an evaluation of the judged weights (`EvalReport.judged`) in `state`."""
        ...

    def reached(self, state: TrainState) -> bool:
        """Whether to stop."""
        ...


class NeverStop:
    """Train to the end."""

    def judge(self, result: EvalResult, state: TrainState) -> None:
        """Take no note."""

    def reached(self, state: TrainState) -> bool:
        """Return False."""
        return False


class TargetStop:
    """Stop when a goal is met. What was met so far is in the state, which is saved, and not here."""

    def __init__(self, goal: Goal) -> None:
        self._goal = goal

    def judge(self, result: EvalResult, state: TrainState) -> None:
        """Count the evaluation, or start counting again."""
        state.hits = self._goal.count(state.hits, result.top1)
        if self.reached(state) and state.target_s is None:
            state.target_s = state.trained_s

    def reached(self, state: TrainState) -> bool:
        """Whether enough evaluations in a row have met the target."""
        return self._goal.is_met(state.hits)


def build_stop_rule(section: Stop | str) -> StopRule:
    """Return the rule of `train.stop`."""
    return TargetStop(Goal(section.top1, section.patience)) if isinstance(section, Stop) else NeverStop()
