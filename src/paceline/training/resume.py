"""Check that a run can be resumed: recipe, dataset and code match, and it has not ended."""

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.core.errors import DataError, PacelineError, RecipeError
from paceline.core.results import FINISHED, RunResult
from paceline.core.run_dir import RunDir, write_atomic
from paceline.core.units import Duration, count
from paceline.data.files import printable
from paceline.recipe.consent import TRUST_CODE
from paceline.recipe.load import load
from paceline.recipe.plan import with_accumulate, with_batch_size
from paceline.recipe.plugins import changed_code
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.base import Off
from paceline.recipe.yaml import to_yaml_text
from paceline.training.checkpoint import CheckpointStorage, KeepPolicy, find_damage, read_state
from paceline.training.goodput import read_attempts

# May change on resume, as they do not affect the weights that result, or like the number of ranks only by rounding and
# by BatchNorm; `_FIXED_FIELDS` are exceptions.
_CHANGEABLE_FIELDS = (
    "log.",
    "model.checkpoint_activations",  # which changes no bit
    "measure.",
    "checkpoint.",
    "parallel.",
    "data.loader",
    "data.stage",
    "data.cache",
    "data.workers",
    "data.worker_timeout",
    "data.on_bad_image",
    "data.max_bad_images",
    "data.eval_batch_size",
    "train.accumulate",  # a run that ended out of memory can go on
    "train.max_time",
    "train.callbacks",
    "data.source.download",
    "data.source.cache",
    "data.source.name",  # a folder may have been packed: `check_dataset` compares the data
    "data.sampler.file",  # which may move: `check_sampler` compares what it says
    "data.source.root",  # data may move
    "data.source.train_root",
    "data.source.val_root",
)
_FIXED_FIELDS = ("parallel.compression", "parallel.powersgd_rank", "parallel.sync_gradients")


def check_rundir(rundir: RunDir, recipe: Recipe, *, resume: bool) -> list[str]:
    """Return a note for each field that `recipe` changes in the resumed run of `rundir`.

    Raise `RecipeError` if `rundir` has another run, or if `recipe` changes the experiment.
    """
    rundir.refuse_links()
    rundir.refuse_another_run(resume=resume)
    if not rundir.recipe.exists():
        return []
    before, after = load(str(rundir.path)).recipe.to_dict(), recipe.to_dict()
    refused = list_forbidden_changes(before, after)
    if refused:
        fix = f"resume it as it was, or start a new run from its weights: model.weights={rundir.path}"
        raise RecipeError(f"--resume: {rundir.path} was started with {', '.join(refused)} ({fix})")
    changes = iter_changes(before, after)
    return [f"resumed with {path}={new}, which was {old}" for path, old, new in changes]


def keep_batch(recipe: Recipe, rundir: RunDir, world_size: int) -> tuple[Recipe, list[str]]:
    """Return `recipe` with the batch size and micro-batches of the run in `rundir`, unless the recipe sets them.

    `auto` micro-batches are measured if those of the run were not.
    Also return a note if `data.rank_batch_size` has no effect.
    """
    each, is_measured = recipe.data.rank_batch_size, recipe.data.is_batch_measured
    if (each == "auto" and not is_measured and recipe.train.accumulate != "auto") or not rundir.recipe.exists():
        return recipe, []
    began = load(str(rundir.path)).recipe
    batch_size = began.data.global_batch_size
    if recipe.train.accumulate == "auto" and read_measured_batch(rundir):
        recipe = with_accumulate(recipe, began.train.num_micro_batches)
    if each == "auto":
        return with_batch_size(recipe, batch_size) if is_measured else recipe, []
    is_same = batch_size == each * world_size
    note = (
        f"resumed on {count(world_size, 'rank')} with data.batch_size={batch_size}, as the run began; "
        f"data.rank_batch_size={each} has no effect"
    )
    return with_batch_size(recipe, batch_size), [] if is_same else [note]


def list_forbidden_changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return what makes recipe `after`, as plain values, another experiment, such as `optim.lr=0.1 (now 0.2)`."""
    changes = iter_changes(before, after)
    return [f"{path}={old} (now {new})" for path, old, new in changes if not _is_changeable(path)]


def check_dataset(checkpoint: Path, digest: str) -> None:
    """Raise `DataError` if `checkpoint` was trained on a dataset with another digest."""
    before = read_state(checkpoint).get("dataset", digest)
    if before != digest:
        raise DataError(
            f"data.source: is not the dataset that {checkpoint} was trained on: images, labels or classes have "
            f"changed (bring them back, or start a new run)"
        )


def check_sampler(checkpoint: Path, digest: str) -> None:
    """Raise `DataError` if the sampler of `checkpoint` had another digest: a column or a file has changed."""
    if read_state(checkpoint).get("sampler", digest) != digest:
        raise DataError(
            f"data.sampler: the values that it draws by are not those that {checkpoint} was trained with (bring the "
            f"column or the file back, or start a new run)"
        )


def list_changed_plugins(checkpoint: Path, plugins: dict[str, Any]) -> list[str]:
    """Return a note for each of `plugins`, from `code_identity`, whose file has changed since `checkpoint`."""
    saved = read_state(checkpoint).get("own_parts")
    before = {name: each for name, each in saved.items() if isinstance(each, dict)} if isinstance(saved, dict) else {}
    others = changed_code(before, plugins)
    return [f"resumed with changed code: the file of {name} has changed" for name in others]


def initialize_rundir(rundir: RunDir, recipe: Recipe, plan: dict[str, Any]) -> None:
    """Create the run directory, and write plan and recipe."""
    rundir.create()
    (rundir.path / "result.json").unlink(missing_ok=True)  # of a process that was preempted
    rundir.write_json("plan.json", plan)  # first: both make a run directory (`is_run`), and a kill may come between
    write_atomic(rundir.recipe, f"# recipe {recipe.hash}\n" + to_yaml_text(recipe.to_dict()))


def read_recipe_origin(rundir: RunDir) -> dict[str, Any]:
    """Return `recipe_name` of the run's first start, and `changes` to that recipe, if known; {} for a new run."""
    plan = rundir.read_plan()
    origin = {key: plan.get(key) for key in ("recipe_name", "changes")}
    return {key: value for key, value in origin.items() if isinstance(value, str | list)}


def read_measured_batch(rundir: RunDir) -> dict[str, Any]:
    """Return `measured_batch` of the run's first start, for provenance; {} if nothing was measured."""
    measured = rundir.read_plan().get("measured_batch")
    return {"measured_batch": measured} if isinstance(measured, dict) else {}


def was_started_by(rundir: RunDir, launch: str) -> bool:
    """Return whether the ranks that last trained in `rundir` were started by the same `launch`."""
    attempts = read_attempts(rundir.attempts)
    return bool(attempts) and attempts[-1].start.launch == launch != ""


def read_final_result(rundir: RunDir, max_time: Duration | Off = "off") -> RunResult | None:
    """Return the result of a finished run, or None. One whose time was up is not finished if `max_time` is longer.

    A run whose final checkpoint is missing or damaged is not finished if an older one exists.
    """
    try:
        result = rundir.read_result()
    except PacelineError:
        return None
    if result.status not in FINISHED:
        return None
    if result.status == "time_reached" and result.goodput is not None:
        running_s = result.goodput.wall_s - result.goodput.down_s
        if max_time == "off" or max_time.seconds > running_s:
            return None
    return None if describe_missing_checkpoint(rundir) else result


def describe_missing_checkpoint(rundir: RunDir) -> str:
    """Return a message if the run has ended but its final weights are missing or damaged, else "".

    A run without any checkpoint is finished. Raise `RecipeError` if its recipe cannot be read.
    """
    try:
        result = rundir.read_result()
    except PacelineError:
        return ""
    checkpoints = CheckpointStorage(rundir.checkpoints, KeepPolicy(1))
    newest = checkpoints.newest()
    if result.status == "preempted" or newest is None or load(str(rundir.path)).recipe.checkpoint.every == "off":
        return ""
    damage = find_damage(checkpoints.path_of(result.steps))
    if not damage:
        return ""
    what = "is damaged" if checkpoints.path_of(result.steps).is_dir() else "is missing"
    return f"{printable(rundir.path)}: the checkpoint of its last step, {result.steps:,}, {what}"


def describe_unsaved_weights(rundir: RunDir, result: RunResult) -> str:
    """Return the error message for a run whose final weights were not saved."""
    newest = CheckpointStorage(rundir.checkpoints, KeepPolicy(1)).newest()
    last = f"is {newest.name}" if newest else "is not there"
    of_code = [TRUST_CODE] if result.provenance.get("own_parts") else []
    command = shlex.join(("paceline", "train", str(rundir.path), "--resume", *of_code))
    return (
        f"{rundir.checkpoints}: the weights of the last step, {result.steps:,}, could not be saved; the last "
        f"checkpoint {last} (free some space, and resume with {command})"
    )


def iter_changes(
    before: dict[str, Any], after: dict[str, Any], prefix: str = ""
) -> Iterator[tuple[str, object, object]]:
    """Yield (path, old, new) of each field that differs; for another variant of a section, only its name."""
    if before.get("name") != after.get("name"):
        yield f"{prefix}name", before.get("name"), after.get("name")
        return
    for key in sorted(before.keys() | after.keys()):
        path = f"{prefix}{key}"
        old, new = before.get(key), after.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from iter_changes(old, new, f"{path}.")
        elif old != new:
            yield path, old, new


def _is_changeable(path: str) -> bool:
    return path not in _FIXED_FIELDS and path.startswith(_CHANGEABLE_FIELDS)
