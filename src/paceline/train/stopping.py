"""Early stopping. The decision uses numbers that are equal on all ranks, so all ranks stop together."""

from typing import Protocol

from paceline.core.goal import AccuracyTarget
from paceline.core.results import EvalResult
from paceline.recipe.schema.train import Stop
from paceline.train.state import TrainState


class StopRule(Protocol):
    """Decide after each evaluation whether to stop."""

    def update(self, result: EvalResult, state: TrainState) -> None:
        """Update the counters in `state` with an evaluation (`EvalReport.primary`)."""
        ...

    def is_met(self, state: TrainState) -> bool:
        """Return whether to stop."""
        ...


class NeverStop:
    """Train to the end."""

    def update(self, result: EvalResult, state: TrainState) -> None:
        """Do nothing."""

    def is_met(self, state: TrainState) -> bool:
        """Return False."""
        return False


class TargetStop:
    """Stop once the target accuracy is met. The counters live in `TrainState`, which checkpoints hold."""

    def __init__(self, goal: AccuracyTarget) -> None:
        self._goal = goal

    def update(self, result: EvalResult, state: TrainState) -> None:
        """Count an evaluation that met the target, or reset the count."""
        state.hits = self._goal.count(state.hits, result.top1)
        if self.is_met(state) and state.target_s is None:
            state.target_s = state.trained_s

    def is_met(self, state: TrainState) -> bool:
        """Return whether enough consecutive evaluations met the target."""
        return self._goal.is_met(state.hits)


def build_stop_rule(section: Stop | str) -> StopRule:
    """Return the stop rule of `train.stop`."""
    return TargetStop(AccuracyTarget(section.top1, section.patience)) if isinstance(section, Stop) else NeverStop()
