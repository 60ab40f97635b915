"""Look at the disk before the first step, when a person is still there: can a run write, and will its checkpoints fit?

It does not reserve the space. What fills the disk later is for `train.checkpoint.writer` to survive.
"""

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from paceline.core.errors import RecipeError
from paceline.core.rundir import RunDir
from paceline.core.units import count, mib
from paceline.recipe.schema.optim import Adam, Lamb, OptimSection, Sgd
from paceline.recipe.schema.recipe import Checkpoint
from paceline.train.checkpoint import model_tensors, optimizer_tensors
from paceline.train.persist import Persistent

_PROBE_BYTES = 4096  # a block: a full disk often takes an empty file


def expected_bytes(persistent: Persistent, section: OptimSection) -> int:
    """Return how large a checkpoint will be, in bytes, but for some thousand.

    An optimizer has no state before its first step; then it is what its kind keeps of each weight.
    """
    weights = [parameter for group in persistent.optimizer.param_groups for parameter in group["params"]]
    moments = sum(tensor.nbytes for tensor in optimizer_tensors(persistent.optimizer).values())
    parts = (model_tensors(persistent.model), persistent.precision.weights.tensors(), persistent.average.tensors())
    held = sum(tensor.nbytes for part in parts for tensor in part.values())
    held += persistent.strategy.memory().num_bytes(persistent.model)
    return held + (moments or _moments_of(section) * sum(weight.nbytes for weight in weights))


def check_disk(rundir: RunDir, section: Checkpoint, state_bytes: int, warn: Callable[[str], None]) -> None:
    """Write to the run directory, which is there, and compare its disk's space with what checkpoints will take.

    Room for all that are kept, one more (the best) and the one being written is enough; less is a warning. Raise
    `RecipeError` when nothing can be written, or when not even one checkpoint fits.
    """
    _write(rundir.path)
    if section.every == "off":
        return
    folder = rundir.checkpoints if rundir.checkpoints.is_dir() else rundir.path
    usage = shutil.disk_usage(folder)
    if usage.total == 0:  # some network file systems say 0 of 0
        return
    there = sum(1 for path in folder.glob("step-*") if path.is_dir())
    needed = max(1, section.keep + 2 - there)
    free, each, every = mib(usage.free), mib(state_bytes), mib(needed * state_bytes)
    if usage.free < state_bytes:
        raise RecipeError(
            f"checkpoint: {folder} has {free} free, a checkpoint takes {each} (free some space, name another with "
            f"--run-dir, or set checkpoint.every=off)"
        )
    if usage.free < needed * state_bytes:
        several = count(needed, "checkpoint")
        warn(
            f"checkpoint: {folder} has {free} free, {several} of {each} take {every} (free some space, or set "
            f"checkpoint.keep={_fitting(section.keep, usage.free, state_bytes, there)})"
        )


def _fitting(keep: int, free: int, state_bytes: int, there: int) -> int:
    return max(1, min(keep - 1, free // state_bytes + there - 2))


def _write(folder: Path) -> None:
    try:
        with tempfile.TemporaryFile(prefix=".probe-", dir=folder) as probe:
            probe.write(bytes(_PROBE_BYTES))
    except OSError as error:
        raise RecipeError(f"--run-dir: {folder} cannot be written to: {error.strerror} (name another)") from None


def _moments_of(section: OptimSection) -> int:
    """Return how many numbers an optimizer keeps of each weight."""
    match section:
        case Sgd(momentum=0):
            return 0
        case Adam() | Lamb():
            return 2
    return 1
