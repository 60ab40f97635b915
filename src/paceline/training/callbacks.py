"""Call the classes of `train.callbacks` on rank 0, with a read-only view of training."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from paceline.core.results import RunResult
from paceline.recipe.plan import Plan
from paceline.recipe.plugins import CALLBACK, PluginRef, plugins_of
from paceline.recipe.schema import Recipe
from paceline.training.logging.base import EvalRecord, LogSink, StepRecord, to_eval_row
from paceline.training.state import TrainState


@dataclass(frozen=True)
class TrainingView:
    """Training after `step` of `total_steps` optimizer steps: values that a callback can read, and not change.

    `lr` is that of the last step. `loss` is the mean over ranks and steps of the last record (`log.every`), None before
    the first of this process. `metrics` hold the last evaluation with the keys of `evals.jsonl`, shares from 0 to 1 and
    times in seconds, and are empty before the first evaluation of this process.
    """

    step: int
    total_steps: int
    epoch: float
    lr: float | None
    loss: float | None
    metrics: MappingProxyType[str, float]
    run_dir: Path


class Callback(Protocol):
    """Base class of callbacks. Override the methods that you need; rank 0 calls them, and training waits for them."""

    def started(self, view: TrainingView) -> None:
        """Receive the state before the first step of this process."""
        return

    def step_ended(self, view: TrainingView) -> None:
        """Receive the state after an optimizer step."""
        return

    def epoch_ended(self, view: TrainingView) -> None:
        """Receive the state after the last step of an epoch, before its evaluation and checkpoint."""
        return

    def evaluated(self, view: TrainingView) -> None:
        """Receive the state after an evaluation."""
        return

    def finished(self, view: TrainingView) -> None:
        """Receive the state at the end of a run that finished or was preempted, but did not fail."""
        return


class CallbackSink(LogSink):
    """Call callbacks in order. Raise `RecipeError` for any exception of one, which names its field and its line."""

    def __init__(self, plugins: Sequence[PluginRef], plan: Plan, run_dir: Path, first_step: int) -> None:
        self._callbacks: list[tuple[PluginRef, Callback]] = [(plugin, plugin.make()) for plugin in plugins]
        self._steps_per_epoch = plan.steps_per_epoch
        epoch = first_step / plan.steps_per_epoch
        self._view = TrainingView(first_step, plan.total_steps, epoch, None, None, MappingProxyType({}), run_dir)

    def started(self, plan: Plan, step: int) -> None:
        """Call `started`."""
        self._call(Callback.started.__name__)

    def step_ended(self, state: TrainState, lr: float) -> None:
        """Call `step_ended` after step `state.step` (from 0), whose learning rate was `lr`.

        Also call `epoch_ended` if it was the last step of an epoch.
        """
        if not self._callbacks:
            return
        step = state.step + 1
        self._view = replace(self._view, step=step, epoch=step / self._steps_per_epoch, lr=lr)
        self._call(Callback.step_ended.__name__)
        if step % self._steps_per_epoch == 0:
            self._call(Callback.epoch_ended.__name__)

    def step(self, record: StepRecord) -> None:
        """Keep the loss of a logged step."""
        self._view = replace(self._view, loss=record.loss)

    def evaluated(self, record: EvalRecord) -> None:
        """Call `evaluated`."""
        metrics = {name: float(value) for name, value in to_eval_row(record).items() if value is not None}
        self._view = replace(self._view, metrics=MappingProxyType(metrics))
        self._call(Callback.evaluated.__name__)

    def finished(self, result: RunResult) -> None:
        """Call `finished`."""
        self._call(Callback.finished.__name__)

    def close(self) -> None:
        """Do nothing."""

    def _call(self, event: str) -> None:
        for plugin, callback in self._callbacks:
            method: Callable[[TrainingView], None] = getattr(callback, event)
            with plugin.reporting(f".{event}"):
                method(self._view)


def build_callbacks(recipe: Recipe, plan: Plan, run_dir: Path, first_step: int) -> CallbackSink:
    """Create the callbacks of `recipe`. Raise `RecipeError` for one that cannot be used."""
    plugins = [plugin for plugin in plugins_of(recipe) if plugin.contract is CALLBACK]
    return CallbackSink(plugins, plan, run_dir, first_step)
