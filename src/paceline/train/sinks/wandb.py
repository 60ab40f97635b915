"""Weights & Biases: one tracker run for all processes of a run.

W&B is configured to print nothing, to limit upload time, and not to collect code, git state or system metrics (see
`measure.telemetry`). It talks to its own process (`wandb-core`) through a Unix socket; offline, that process writes
below the run directory without network access.

Offline, each process of a run has its own folder, which W&B syncs as the whole run: the last one synced replaces the
others (https://github.com/wandb/wandb/issues/3841). Each process therefore logs the complete run.
"""

import importlib
from typing import Any, Final

from paceline.core.results import RunResult
from paceline.core.rundir import RunDir
from paceline.recipe.plan import Plan
from paceline.recipe.schema.log import Wandb
from paceline.recipe.schema.recipe import Recipe
from paceline.train.logsink import EvalRecord, StepRecord
from paceline.train.sinks.aside import FLUSH_S
from paceline.train.sinks.note import TrackerState
from paceline.train.sinks.values import eval_metrics, flatten_result, run_config, step_metrics

_INIT_TIMEOUT_S: Final = 30.0
"""Timeout of the server's first response, in seconds; training does not wait for it. Chosen; W&B's default is 90."""


class WandbSink:
    """A W&B run with W&B's own steps. The exit code is 0 for a finished run, else 1."""

    def __init__(self, section: Wandb, rundir: RunDir, recipe: Recipe, state: TrackerState) -> None:
        self._wandb = importlib.import_module("wandb")
        self._section = section
        self._rundir = rundir
        self._recipe = recipe
        self._tracker_state = state
        self._run: Any = None
        self._exit_code = 1

    def started(self, plan: Plan, step: int) -> None:
        """Start a run, or resume the one of `note`."""
        section = self._section
        settings = self._wandb.Settings(
            console="off",
            silent=True,
            finish_timeout=FLUSH_S,
            init_timeout=_INIT_TIMEOUT_S,
            disable_git=True,
            disable_code=True,
            x_disable_stats=True,
        )
        mode = resolve_wandb_mode(self._wandb, settings, section.mode)
        if mode == "offline":  # for the whole process: W&B would send telemetry otherwise
            self._wandb.setup(settings=self._wandb.Settings(mode=mode))
        run_id = self._tracker_state.run_id or self._tracker_state.set_run_id()
        self._run = self._wandb.init(
            project=section.project,
            entity=None if section.entity == "auto" else section.entity,
            name=self._tracker_state.title,
            id=run_id,
            resume=None if mode == "offline" else "allow",
            dir=str(self._rundir.path),
            config=run_config(self._recipe, plan),
            mode=mode,
            reinit="create_new",  # do not end a run that other code has in this process
            settings=settings,
        )
        self._tracker_state.set_location(str(self._run.dir) if mode == "offline" else mode)

    def step(self, record: StepRecord) -> None:
        """Add a row to the history."""
        self._run.log(step_metrics(record), step=record.step)

    def evaluated(self, record: EvalRecord) -> None:
        """Add to the row of the step, or a new row."""
        self._run.log(eval_metrics(record), step=record.step)

    def warned(self, message: str) -> None:
        """Do nothing."""

    def finished(self, result: RunResult) -> None:
        """Write the result to the summary."""
        self._run.summary.update({f"result/{name}": value for name, value in flatten_result(result).items()})
        self._exit_code = 0 if result.status in ("completed", "target_reached") else 1
        if result.status == "preempted":
            self._run.mark_preempting()

    def close(self) -> None:
        """Flush and finish."""
        self._run.finish(exit_code=self._exit_code)


def resolve_wandb_mode(wandb: Any, settings: Any, mode: str) -> str:
    """Return the W&B mode for the recipe's mode `mode`.

    `auto` is the mode of W&B's settings (WANDB_MODE, `wandb offline`). If that is the default, online, it requires
    credentials (WANDB_API_KEY, settings, netrc), and is offline without them.
    """
    if mode != "auto":
        return mode
    configured: str = wandb.setup(settings=settings).settings.mode
    if configured != "online":
        return configured
    return "online" if wandb.login(prompt=False, verify=False) else "offline"
