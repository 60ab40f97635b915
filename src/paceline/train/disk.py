"""Check before the first step that the disk is writable and has room for the checkpoints.

Space is not reserved; `train.checkpoint.writer` handles a disk that fills up later.
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
from paceline.train.persist import TrainingState

_PROBE_BYTES = 4096  # a block: a full disk often takes an empty file


def estimate_checkpoint_bytes(training_state: TrainingState, section: OptimSection) -> int:
    """Return the size of a checkpoint in bytes, except for some thousand."""
    weights = [parameter for group in training_state.optimizer.param_groups for parameter in group["params"]]
    moments = sum(tensor.nbytes for tensor in optimizer_tensors(training_state.optimizer).values())
    parts = (
        model_tensors(training_state.model),
        training_state.precision.weights.tensors(),
        training_state.average.tensors(),
    )
    num_bytes = sum(tensor.nbytes for part in parts for tensor in part.values())
    num_bytes += training_state.strategy.comm_state().num_bytes(training_state.model)
    # Before the first step an optimizer has no state.
    return num_bytes + (moments or _moments_per_weight(section) * sum(weight.nbytes for weight in weights))


def check_disk(rundir: RunDir, section: Checkpoint, state_bytes: int, warn: Callable[[str], None]) -> None:
    """Write to the existing run directory, and compare its free space with the size of the checkpoints.

    The checkpoints that are kept, the best one and the one being written should fit; less is a warning. Raise
    `RecipeError` if the disk is not writable, or not even one checkpoint fits.
    """
    _check_writable(rundir.path)
    if section.every == "off":
        return
    folder = rundir.checkpoints if rundir.checkpoints.is_dir() else rundir.path
    usage = shutil.disk_usage(folder)
    if usage.total == 0:  # some network file systems report 0 of 0
        return
    num_existing = sum(1 for path in folder.glob("step-*") if path.is_dir())
    needed = max(1, section.keep + 2 - num_existing)
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
            f"checkpoint.keep={_largest_fitting_keep(section.keep, usage.free, state_bytes, num_existing)})"
        )


def _largest_fitting_keep(keep: int, free: int, state_bytes: int, num_existing: int) -> int:
    return max(1, min(keep - 1, free // state_bytes + num_existing - 2))


def _check_writable(folder: Path) -> None:
    try:
        with tempfile.TemporaryFile(prefix=".probe-", dir=folder) as probe:
            probe.write(bytes(_PROBE_BYTES))
    except OSError as error:
        raise RecipeError(f"--run-dir: {folder} cannot be written to: {error.strerror} (name another)") from None


def _moments_per_weight(section: OptimSection) -> int:
    """Return the number of values that an optimizer keeps per weight."""
    match section:
        case Sgd(momentum=0):
            return 0
        case Adam() | Lamb():
            return 2
    return 1
