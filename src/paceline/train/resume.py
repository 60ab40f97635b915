"""Go on with a run: is it the same recipe, has it ended already, and where was it?"""

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.core.errors import DataError, PacelineError, RecipeError
from paceline.core.json_file import read_json
from paceline.core.results import RunResult
from paceline.core.rundir import RunDir, write_atomic
from paceline.core.units import count
from paceline.data.sources.places import printable
from paceline.recipe.code_identity import changed_code, code_identity
from paceline.recipe.consent import OWN_CODE
from paceline.recipe.load import load
from paceline.recipe.plan import with_batch_size
from paceline.recipe.schema import Recipe
from paceline.recipe.yamlfile import write_text
from paceline.train.attempts import read_attempts
from paceline.train.checkpoint import Checkpoints, Keep, damage_of, read_state

_FREE_TO_CHANGE = (
    "log.",
    "measure.",
    "checkpoint.",
    "parallel.",
    "data.loader",
    "data.stage",
    "data.workers",
    "data.worker_timeout",
    "data.on_bad_image",
    "data.max_bad_images",
    "data.eval_batch_size",
    "data.source.download",
    "data.source.cache",
    "data.source.name",  # a folder may have been packed: `check_dataset` sees that it is the same set
    "data.source.root",  # data may move
    "data.source.train_root",
    "data.source.val_root",
)


_NEVER_FREE = ("parallel.compression", "parallel.powersgd_rank", "parallel.sync_gradients")


def check_rundir(rundir: RunDir, recipe: Recipe, *, resume: bool) -> list[str]:
    """Return what `recipe` changes of the run in `rundir` that is resumed, a sentence each.

    Raise `RecipeError` when `rundir` holds another run, or when `recipe` would make this one another experiment.
    """
    rundir.refuse_links()
    rundir.refuse_another_run(resume=resume)
    if not rundir.recipe.exists():
        return []
    before = load(str(rundir.path)).recipe
    refused = not_free(before, recipe)
    if refused:
        fix = f"resume it as it was, or start a new run from its weights: model.weights={rundir.path}"
        raise RecipeError(f"--resume: {rundir.path} was started with {', '.join(refused)} ({fix})")
    changes = changed(before.to_dict(), recipe.to_dict())
    return [f"resumed with {path}={new}, which was {old}" for path, old, new in changes]


def keep_batch(recipe: Recipe, rundir: RunDir, world_size: int) -> tuple[Recipe, list[str]]:
    """Return `recipe` with the global batch of the run in `rundir`, which goes on with it on any number of ranks.

    A batch per rank gives way, and the sentences say so; another `data.batch_size` is another experiment.
    """
    if recipe.data.rank_batch_size == "auto" or not rundir.recipe.exists():
        return recipe, []
    batch_size = load(str(rundir.path)).recipe.data.global_batch_size
    each = recipe.data.rank_batch_size
    is_same = batch_size == each * world_size
    note = (
        f"resumed on {count(world_size, 'rank')} with data.batch_size={batch_size}, as the run began; "
        f"data.rank_batch_size={each} has no effect"
    )
    return with_batch_size(recipe, batch_size), [] if is_same else [note]


def not_free(before: Recipe, after: Recipe) -> list[str]:
    """Return what makes another experiment of `before`, such as `optim.lr=0.1 (now 0.2)`."""
    changes = changed(before.to_dict(), after.to_dict())
    return [f"{path}={old} (now {new})" for path, old, new in changes if not _is_free(path)]


def check_dataset(checkpoint: Path, digest: str) -> None:
    """Raise `DataError` when `checkpoint` was written in training on another data set than that of `digest`."""
    before = read_state(checkpoint).get("dataset", digest)
    if before != digest:
        raise DataError(
            f"data.source: is not the data set that {checkpoint} was trained on: images, labels or classes have "
            f"changed (bring them back, or start a new run)"
        )


def other_code(checkpoint: Path, recipe: Recipe) -> list[str]:
    """Return a sentence for each part of a user's own whose file was another one when `checkpoint` was written."""
    held = read_state(checkpoint).get("own_parts")
    before = {name: each for name, each in held.items() if isinstance(each, dict)} if isinstance(held, dict) else {}
    others = changed_code(before, code_identity(recipe))
    return [f"resumed with other code of {name}: its file has changed" for name in others]


def open_rundir(rundir: RunDir, recipe: Recipe, plan: dict[str, Any]) -> None:
    """Make the run directory and write plan and recipe into it."""
    rundir.create()
    (rundir.path / "result.json").unlink(missing_ok=True)  # of a process that was preempted
    rundir.write_json("plan.json", plan)  # first: both make a run directory (`is_run`), and a kill may come between
    write_atomic(rundir.recipe, f"# recipe {recipe.hash}\n" + write_text(recipe.to_dict()))


def recipe_name_of(rundir: RunDir) -> str:
    """Return the recipe name that a run was started with, "" for a new run: a resumed one is named after its folder."""
    try:
        name = read_json(rundir.path / "plan.json")["recipe_name"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return name if isinstance(name, str) else ""


def is_of_launch(rundir: RunDir, launch: str) -> bool:
    """Whether `rundir` was begun by ranks that the launcher of this one, called `launch`, had started before."""
    attempts = read_attempts(rundir.attempts)
    return bool(attempts) and attempts[-1].start.launch == launch != ""


def finished(rundir: RunDir) -> RunResult | None:
    """Return the result of a run that has ended as it was meant to, or None; one that cannot be read is none.

    A run whose last checkpoint is gone or damaged has not ended, where an older one is there to resume from.
    """
    try:
        result = rundir.read_result()
    except PacelineError:
        return None
    if result.status not in ("completed", "target_reached"):
        return None
    return None if missing_end(rundir) else result


def missing_end(rundir: RunDir) -> str:
    """Return a sentence where the run in `rundir` has ended, and its final weights are not there; else "".

    A run that saves nothing (`checkpoint.every=off`), or whose checkpoints were all removed, is left as it is. Raise
    `RecipeError` where the recipe of the run cannot be read.
    """
    try:
        result = rundir.read_result()
    except PacelineError:
        return ""
    checkpoints = Checkpoints(rundir.checkpoints, Keep(1))
    newest = checkpoints.newest()
    if result.status == "preempted" or newest is None or load(str(rundir.path)).recipe.checkpoint.every == "off":
        return ""
    damage = damage_of(checkpoints.path_of(result.steps))
    if not damage:
        return ""
    what = "is damaged" if checkpoints.path_of(result.steps).is_dir() else "is missing"
    return f"{printable(rundir.path)}: the checkpoint of its last step, {result.steps:,}, {what}"


def unsaved(rundir: RunDir, result: RunResult) -> str:
    """Return the error of a run whose final weights could not be saved."""
    newest = Checkpoints(rundir.checkpoints, Keep(1)).newest()
    last = f"is {newest.name}" if newest else "is not there"
    of_code = [OWN_CODE] if result.provenance.get("own_parts") else []
    words = shlex.join(("paceline", "train", str(rundir.path), "--resume", *of_code))
    return (
        f"{rundir.checkpoints}: the weights of the last step, {result.steps:,}, could not be saved; the last "
        f"checkpoint {last} (free some space, and resume with {words})"
    )


def changed(before: dict[str, Any], after: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, object, object]]:
    """Yield (path, old, new) for each field that differs; of a section that is of another variant, its name alone."""
    if before.get("name") != after.get("name"):
        yield f"{prefix}name", before.get("name"), after.get("name")
        return
    for key in sorted(before.keys() | after.keys()):
        path = f"{prefix}{key}"
        old, new = before.get(key), after.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from changed(old, new, f"{path}.")
        elif old != new:
            yield path, old, new


def _is_free(path: str) -> bool:
    """Whether a field may change in the middle of a run: what is learnt does not depend on it."""
    return path not in _NEVER_FREE and path.startswith(_FREE_TO_CHANGE)
