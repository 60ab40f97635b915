"""Weights & Biases: one of its runs for a run, over all processes of it.

It is told to keep its hands off the terminal, to give up on uploading in time, and to leave alone what the run does not
tell it: the code's repository with what is not committed in it, the code, and how busy the machine is, which
`measure.telemetry` sees. Its own process (`wandb-core`) is spoken to through a Unix socket; offline, that writes files
below the run directory and asks nobody for anything.

Offline, each process of a run has a folder of its own, which W&B sends as the whole run: of two, the last that is sent
replaces what the other has told (https://github.com/wandb/wandb/issues/3841). So each is told everything.
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
from paceline.train.sinks.note import Note
from paceline.train.sinks.values import config, eval_values, result_values, step_values

_INIT_S: Final = 30.0
"""For the first answer of a server, in seconds. Training does not wait for it. Chosen; W&B's own is 90."""


class WandbSink:
    """A run of W&B, which `note` names; steps are W&B's own. Ended as meant, its exit code is 0, and 1 otherwise."""

    def __init__(self, section: Wandb, rundir: RunDir, recipe: Recipe, note: Note) -> None:
        self._wandb = importlib.import_module("wandb")
        self._section = section
        self._rundir = rundir
        self._recipe = recipe
        self._note = note
        self._run: Any = None
        self._exit_code = 1

    def started(self, plan: Plan, step: int) -> None:
        """Begin a run, or go on with that which `note` names."""
        section = self._section
        settings = self._wandb.Settings(
            console="off",
            silent=True,
            finish_timeout=FLUSH_S,
            init_timeout=_INIT_S,
            disable_git=True,
            disable_code=True,
            x_disable_stats=True,
        )
        mode = wandb_mode(self._wandb, settings, section.mode)
        if mode == "offline":  # for all of W&B in this process, which would report how it is used, over the network
            self._wandb.setup(settings=self._wandb.Settings(mode=mode))
        run_id = self._note.run or self._note.name_run()
        self._run = self._wandb.init(
            project=section.project,
            entity=None if section.entity == "auto" else section.entity,
            name=self._note.title,
            id=run_id,
            resume=None if mode == "offline" else "allow",
            dir=str(self._rundir.path),
            config=config(self._recipe, plan),
            mode=mode,
            reinit="create_new",  # a run that somebody else has in this process is not ours to end
            settings=settings,
        )
        self._note.goes_to(str(self._run.dir) if mode == "offline" else mode)

    def step(self, record: StepRecord) -> None:
        """Add a row to its history."""
        self._run.log(step_values(record), step=record.step)

    def evaluated(self, record: EvalRecord) -> None:
        """Add to the row of the step, or a row."""
        self._run.log(eval_values(record), step=record.step)

    def warned(self, message: str) -> None:
        """Do nothing: a warning is no number."""

    def finished(self, result: RunResult) -> None:
        """Put the result into its summary."""
        self._run.summary.update({f"result/{name}": value for name, value in result_values(result).items()})
        self._exit_code = 0 if result.status in ("completed", "target_reached") else 1
        if result.status == "preempted":
            self._run.mark_preempting()

    def close(self) -> None:
        """Have it write and send what it holds."""
        self._run.finish(exit_code=self._exit_code)


def wandb_mode(wandb: Any, settings: Any, asked: str) -> str:
    """Return the mode of W&B that `asked` comes to.

    `auto` is what W&B's own settings say (WANDB_MODE, `wandb offline`) unless that is its default, online: then it is
    online where W&B finds credentials (WANDB_API_KEY, settings, netrc), which it looks for without asking anybody.
    """
    if asked != "auto":
        return asked
    own: str = wandb.setup(settings=settings).settings.mode
    if own != "online":
        return own
    return "online" if wandb.login(prompt=False, verify=False) else "offline"
