"""trackio: one tracker run for all processes of a run, stored in SQLite databases in TRACKIO_DIR."""

import importlib
import sys
from functools import partial
from typing import Any

from paceline.core.results import RunResult
from paceline.recipe.plan import Plan
from paceline.recipe.schema.log import Trackio
from paceline.recipe.schema.recipe import Recipe
from paceline.train.logsink import EvalRecord, StepRecord
from paceline.train.sinks.note import TrackerState
from paceline.train.sinks.values import eval_metrics, result_metrics, run_config, step_metrics


class TrackioSink:
    """A trackio run. trackio identifies runs by name, so the name ends with an ID."""

    def __init__(self, section: Trackio, recipe: Recipe, state: TrackerState) -> None:
        self._trackio = importlib.import_module("trackio")
        self._section = section
        self._recipe = recipe
        self._tracker_state = state
        self._run: Any = None

    def started(self, plan: Plan, step: int) -> None:
        """Start a run, or resume the one of `note`."""
        name = f"{self._tracker_state.title}-{self._tracker_state.run_id or self._tracker_state.set_run_id()}"
        _print_to_stderr()
        self._run = self._trackio.init(
            project=self._section.project,
            name=name,
            resume="allow",
            config=run_config(self._recipe, plan),
            embed=False,
            auto_log_gpu=False,  # `measure.telemetry` does
            auto_log_cpu=False,
        )

    def step(self, record: StepRecord) -> None:
        """Add a row."""
        self._run.log(step_metrics(record), step=record.step)

    def evaluated(self, record: EvalRecord) -> None:
        """Add a row."""
        self._run.log(eval_metrics(record), step=record.step)

    def warned(self, message: str) -> None:
        """Do nothing."""

    def finished(self, result: RunResult) -> None:
        """Add the numbers of the result as a row, unless the run was preempted."""
        if result.status != "preempted":
            self._run.log(result_metrics(result), step=result.steps)

    def close(self) -> None:
        """Flush and finish."""
        _print_to_stderr()  # it may have imported further modules
        self._run.finish()


def _print_to_stderr() -> None:
    """Redirect `print` in trackio's modules to stderr."""
    # trackio prints progress to stdout, which carries paceline's output. `sys.stdout` itself is shared by all threads.
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "trackio":
            vars(module)["print"] = partial(print, file=sys.stderr)
