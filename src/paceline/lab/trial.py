"""Trials: variations of a recipe, each run in its own process."""

import contextlib
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from paceline.core.errors import PacelineError, RecipeError
from paceline.core.experiments.task_lock import write_shared
from paceline.core.results import RunResult
from paceline.core.run_dir import RunDir
from paceline.recipe.consent import consent_arguments
from paceline.recipe.load import Layer, Patch, merge_layers, validate
from paceline.recipe.schema import Recipe
from paceline.recipe.yaml import read_yaml_value, to_yaml_text

_MAX_NAME_LENGTH: Final = 60


@dataclass(frozen=True)
class Trial:
    """A variation of a base recipe, how often it is run, and what it `explains`, in a few words.

    `ranks` is the number of ranks (None: the runner's), over `nodes` nodes of a Slurm allocation (0: this machine,
    without srun). `is_cold` runs it with its files outside of the page cache. With `first_seed`, turn t has the seed
    first_seed + t - 1; without it, all turns are the same run.
    """

    name: str
    patch: Patch = field(default_factory=Patch)
    repeats: int = 1
    explains: str = ""
    ranks: int | None = None
    nodes: int = 0
    is_cold: bool = False
    first_seed: int | None = None

    def in_turn(self, turn: int) -> "Trial":
        """Return the trial of a turn, counted from 1."""
        if self.first_seed is None:
            return self
        seed = ("seed", self.first_seed + turn - 1)
        return replace(self, patch=Patch((*self.patch.assignments, seed)), first_seed=None)


@dataclass(frozen=True)
class TrialOutcome:
    """Outcome of one run of a trial; `repeat` counts from 1. Without a result, `error` is the reason in one line.

    `exit_code` and `stderr` are of the process. `is_reused` if the run existed already.
    """

    trial: Trial
    repeat: int
    rundir: RunDir
    result: RunResult | None
    error: str = ""
    exit_code: int = 0
    stderr: str = ""
    is_reused: bool = False

    @property
    def folder(self) -> str:
        """Run directory relative to the experiment's: `trials/NAME`."""
        return f"{self.rundir.path.parent.name}/{self.rundir.path.name}"


def apply_patch(recipe: Recipe, patch: Patch) -> Recipe:
    """Return `recipe` with `patch` applied. Raise `RecipeError` if they do not fit."""
    return validate(merge_layers([Layer(recipe.to_dict(), "default"), Layer(patch.values(), "command line")]))


def write_recipe(recipe: Recipe, path: Path) -> None:
    """Write a recipe that `paceline train PATH` can read. Raise `PacelineError` if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Tasks of an experiment write and read the same file at the same time.
        write_shared(path, to_yaml_text(recipe.to_dict()))
    except OSError as error:
        raise PacelineError(f"{path}: cannot be written: {error.strerror} (name another --run-dir)") from None


def format_patch(patch: Patch) -> list[str]:
    """Return a patch as `KEY=VALUE` arguments, which `Patch.parse` reads back to an equal patch."""
    return [f"{path}={_format_value(value)}" for path, value in patch.assignments]


def _format_value(value: object) -> str:
    if isinstance(value, str):
        with contextlib.suppress(RecipeError):
            if read_yaml_value(value, "value") == value:
                return value
    return json.dumps(value)  # JSON is YAML, too


def build_train_command(
    trial: Trial, recipe: Recipe, recipe_file: Path, ranks: int, rundir: Path, options: Sequence[str] = ()
) -> list[str]:
    """Return the command that runs a trial once in new processes: `paceline train` with `options`; `recipe_file` is
    `recipe`.
    """
    # -P: do not import modules from the current folder, which may hold untrusted data.
    arguments = [
        sys.executable,
        "-P",
        "-m",
        "paceline",
        "train",
        str(recipe_file),
        *format_patch(trial.patch),
        # Whoever started this process has consented to the code that the recipe names.
        *consent_arguments(recipe),
    ]
    return build_launch_command(
        [*arguments, "--ranks", str(ranks), "--run-dir", str(rundir), *options, "--json"], trial.nodes, ranks
    )


def build_eval_command(recipe: Recipe, rundir: Path, predictions: Path, ranks: int) -> list[str]:
    """Return the command that evaluates the run of `recipe` in `rundir`, and writes the CSV file `predictions`."""
    options = ["--predictions", str(predictions), "--ranks", str(ranks), "--oversubscribe", "--json"]
    return [sys.executable, "-P", "-m", "paceline", "eval", str(rundir), *options, *consent_arguments(recipe)]


def build_launch_command(command: Sequence[str], nodes: int, ranks: int, options: Sequence[str] = ()) -> list[str]:
    """Return the command that launches `command` on this machine, or on `nodes` by srun with `options`."""
    if not nodes:
        return list(command)
    # A single task of a job step takes the number of ranks from the command, as without srun.
    tasks = [f"--ntasks={ranks}", f"--ntasks-per-node={ranks // nodes}"]
    return ["srun", f"--nodes={nodes}", *tasks, "--relative=0", "--kill-on-bad-exit=1", *options, *command]


def build_run_name(trial: Trial, recipe: Recipe, ranks: int, repeat: int) -> str:
    """Return the folder name of a run, unique within an experiment: trial, recipe hash, ranks and nodes, repeat."""
    # The hash keeps apart trials whose shortened names are equal.
    name = re.sub(r"[^A-Za-z0-9._=-]+", "-", trial.name)[:_MAX_NAME_LENGTH].strip("-.")
    layout = f"{ranks}r" + (f"{trial.nodes}n" if trial.nodes else "")
    return f"{name}-{apply_patch(recipe, trial.patch).hash[:8]}-{layout}-{repeat}"
