"""A trial: a variation of a recipe that is measured in processes of its own. What comes of it is read from run
directories alone. Which trials to run, and what their results mean, is said elsewhere."""

import contextlib
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from paceline.core.errors import PacelineError, RecipeError
from paceline.core.experiments.sharing import write_beside_others
from paceline.core.results import RunResult
from paceline.core.rundir import RunDir
from paceline.recipe.consent import consent_words
from paceline.recipe.layers import Layer, merge
from paceline.recipe.load import validate
from paceline.recipe.patch import Patch
from paceline.recipe.schema import Recipe
from paceline.recipe.yamlfile import read_value, write_text

_NAME_LENGTH: Final = 60


@dataclass(frozen=True)
class Trial:
    """A variation of a base recipe, how often it is run, and in a few words what it `explains`.

    `expects` are the stages that it is to shrink. `ranks` are those it runs on (None: as many as the others), over
    `nodes` nodes of a Slurm allocation (0: here, without srun). With `is_cold` its files are to be out of the kernel's
    cache when it starts.
    """

    name: str
    patch: Patch = field(default_factory=Patch)
    repeats: int = 1
    explains: str = ""
    expects: tuple[str, ...] = ()
    ranks: int | None = None
    nodes: int = 0
    is_cold: bool = False


@dataclass(frozen=True)
class Outcome:
    """What came of a run of a trial; `repeat` counts from 1. Without a result, `error` says in one line why.

    `code` is the exit code of the process, and `said` what it wrote on standard error. `is_known` says that the run was
    there already, and nothing was run.
    """

    trial: Trial
    repeat: int
    rundir: RunDir
    result: RunResult | None
    error: str = ""
    code: int = 0
    said: str = ""
    is_known: bool = False


def vary(recipe: Recipe, patch: Patch) -> Recipe:
    """Return `recipe` with `patch` over it. Raise `RecipeError` where the two do not fit."""
    return validate(merge([Layer(recipe.to_dict(), "default"), Layer(patch.values(), "command line")]))


def write_recipe(recipe: Recipe, path: Path) -> None:
    """Write a recipe that `paceline train PATH` reads back. Raise `PacelineError` when it cannot be written.

    Tasks of an experiment write the same one, and have it read, at the same time.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_beside_others(path, write_text(recipe.to_dict()))
    except OSError as error:
        raise PacelineError(f"{path}: cannot be written: {error.strerror} (name another --run-dir)") from None


def words_of(patch: Patch) -> list[str]:
    """Return a patch as the `KEY=VALUE` words that `Patch.parse` reads back to an equal one."""
    return [f"{path}={_word(value)}" for path, value in patch.assignments]


def _word(value: object) -> str:
    if isinstance(value, str):
        with contextlib.suppress(RecipeError):
            if read_value(value, "value") == value:
                return value
    return json.dumps(value)  # which is YAML too


def command_of(
    trial: Trial, recipe: Recipe, recipe_file: Path, ranks: int, rundir: Path, options: Sequence[str] = ()
) -> list[str]:
    """Return the words that run a trial once: a `paceline train` with `options` in fresh processes of this Python.

    `recipe` stands in `recipe_file`, where we have written it: whoever started us has consented to its code.
    """
    # -P: a module in the current folder, which may be somebody's data, is not to be imported.
    program = [
        sys.executable,
        "-P",
        "-m",
        "paceline",
        "train",
        str(recipe_file),
        *words_of(trial.patch),
        *consent_words(recipe),
    ]
    return started([*program, "--ranks", str(ranks), "--run-dir", str(rundir), *options, "--json"], trial.nodes, ranks)


def started(words: Sequence[str], nodes: int, ranks: int, options: Sequence[str] = ()) -> list[str]:
    """Return what starts `words` where `ranks` of a trial start: here, or on `nodes` by srun, which has `options`."""
    if not nodes:
        return list(words)
    # A task that is alone in its step takes the number of ranks from the words, as it would without srun.
    tasks = [f"--ntasks={ranks}", f"--ntasks-per-node={ranks // nodes}"]
    return ["srun", f"--nodes={nodes}", *tasks, "--relative=0", "--kill-on-bad-exit=1", *options, *words]


def folder_name(trial: Trial, recipe: Recipe, ranks: int, repeat: int) -> str:
    """Return what the folder of a run is called, which two different runs of an experiment never share.

    It has the trial's name, the hash of its recipe, its ranks and nodes, and the number of the run.
    """
    name = re.sub(r"[^A-Za-z0-9._=-]+", "-", trial.name)[:_NAME_LENGTH].strip("-.")
    place = f"{ranks}r" + (f"{trial.nodes}n" if trial.nodes else "")
    return f"{name}-{vary(recipe, trial.patch).hash[:8]}-{place}-{repeat}"
