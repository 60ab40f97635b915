"""Checks before the first step: free disk space, the user's own components, and the time to save."""

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

from paceline.core.dataset import Datasets, Source
from paceline.core.errors import RecipeError
from paceline.core.results import CheckpointResult
from paceline.core.run_dir import RunDir
from paceline.core.units import count, mib
from paceline.core.world import World
from paceline.data.augment.plugin import try_plugin_augments
from paceline.measure.timer import StageTimer
from paceline.models.pretrained import find_weights_file
from paceline.models.validate import build_model_on_device
from paceline.parallel.device import choose_device
from paceline.recipe.plan import Plan
from paceline.recipe.plugins import describe_error
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.base import is_plugin_name
from paceline.recipe.schema.optim import Adam, Lamb, OptimSection, OwnOptim, Sgd
from paceline.recipe.schema.recipe import Checkpoint
from paceline.training.checkpoint import (
    CheckpointStorage,
    CheckpointWriter,
    KeepPolicy,
    Snapshot,
    model_tensors,
    optimizer_tensors,
)
from paceline.training.context import RunContext
from paceline.training.ema import build_weight_average
from paceline.training.init_weights import find_initial_checkpoint
from paceline.training.loss import build_loss
from paceline.training.optim.build import build_optimizer, describe_layer_decay, layers_for_decay
from paceline.training.optim.extra_state import ExtraOptimizerState
from paceline.training.saver import TrainingState

_PROBE_BYTES = 4096  # a block: a full disk often takes an empty file


def estimate_checkpoint_bytes(training_state: TrainingState, section: OptimSection) -> int:
    """Return the size of a checkpoint in bytes, except for some thousand."""
    weights = [parameter for group in training_state.optimizer.param_groups for parameter in group["params"]]
    moments = sum(tensor.nbytes for tensor in optimizer_tensors(training_state.optimizer).values())
    groups = (
        model_tensors(training_state.model),
        training_state.precision.tensors(),
        training_state.average.tensors() if training_state.average else {},
    )
    num_bytes = sum(tensor.nbytes for group in groups for tensor in group.values())
    powersgd = training_state.strategy.powersgd
    num_bytes += powersgd.num_bytes(training_state.model) if powersgd else 0
    # Before the first step an optimizer has no state.
    return num_bytes + (moments or _moments_per_weight(section) * sum(weight.nbytes for weight in weights))


def check_disk(rundir: RunDir, section: Checkpoint, state_bytes: int, warn: Callable[[str], None]) -> None:
    """Check that the run directory is writable and has room for the kept, the best and the next checkpoint.

    Less room is a warning. Raise `RecipeError` if the disk is not writable, or not even one checkpoint fits.
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


def try_components(recipe: Recipe, plan: Plan, train: Source) -> tuple[str, ...]:
    """Build the components of `recipe` as a run would; return notes on the optimizer and the loss.

    Raise `RecipeError` for missing initial weights, settings without effect on this model, unknown classes, and a
    plugin that cannot be built, used or saved.
    """
    try_plugin_augments(recipe.data.augment, plan.channels, plan.image_size)
    is_plugin = isinstance(recipe.optim, OwnOptim)
    # The user's own code may depend on values; for the others, meta tensors suffice.
    device = torch.device("cpu" if is_plugin or is_plugin_name(recipe.model.name) else "meta")
    with torch.random.fork_rng(devices=[]):
        model = build_model_on_device(recipe.model, plan, device)
    checkpoint = find_initial_checkpoint(recipe.model.weights)
    if recipe.model.weights != "off" and not checkpoint:
        find_weights_file(recipe.model.weights)
    layers = layers_for_decay(recipe.optim, model)
    optimizer = build_optimizer(_without_kernels(recipe.optim), model.named_parameters(), device.type, layers)
    if is_plugin:
        with torch.random.fork_rng(devices=[]):
            _try_optimizer_step(recipe.optim, optimizer, model)
    _, weights_note = build_loss(recipe.train, train, torch.device("cpu"))
    return tuple(filter(None, (describe_layer_decay(recipe.optim, optimizer, layers), weights_note)))


def _without_kernels(section: OptimSection) -> OptimSection:
    """Return `section` without fused or foreach kernels, which torch rejects for meta tensors."""
    if isinstance(section, Sgd | Adam):
        return section.model_copy(update={"implementation": "loop"})
    return section


def _try_optimizer_step(section: OptimSection, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    extra_state = ExtraOptimizerState.from_optimizer(optimizer, section.name)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    try:
        optimizer.step()
    except Exception as error:
        raise RecipeError(
            f"optim.name: {section.name} raised {describe_error(error)} in its first step (fix it)"
        ) from error
    extra_state.values()  # raises for state that cannot be saved


def measure_saving(recipe: Recipe, folder: Path, datasets: Datasets, times: int = 3) -> CheckpointResult:
    """Return the means over `times` saves of the state of `recipe`, on one rank, in a temporary folder below `folder`.

    Nothing trains meanwhile, so background writes may take longer in a run. Raise `CheckpointError` if a checkpoint
    cannot be written, `RecipeError` if the folder cannot be.
    """
    snapshot = Snapshot(_state_tensors(recipe, datasets), {"train": {}})
    stall, whole = StageTimer(), StageTimer()
    with _temporary_folder(folder) as below:
        checkpoints = CheckpointStorage(below, KeepPolicy(num_newest=1))
        is_background = recipe.checkpoint.background == "on"
        writer = CheckpointWriter(checkpoints, background=is_background, on_failure="stop", warn=_ignore_warning)
        with contextlib.closing(writer):
            writer.save(0, -1, snapshot)  # not counted: it allocates memory
            writer.flush()
            for step in range(1, times + 1):
                with whole.turn():
                    with stall.turn():
                        writer.save(step, -1, snapshot)
                    writer.flush()
    return CheckpointResult(
        saved=times,
        failed=0,
        stall_s=stall.total_s / times,
        write_s=whole.total_s / times,
        bytes=snapshot.num_bytes,
    )


@contextlib.contextmanager
def _temporary_folder(folder: Path) -> Iterator[Path]:
    try:
        below = tempfile.TemporaryDirectory(prefix=".paceline-", dir=folder)
    except OSError as error:
        raise RecipeError(f"{folder}: cannot be written to: {error.strerror} (go to a folder that can)") from None
    with below as name:
        yield Path(name)


def _state_tensors(recipe: Recipe, datasets: Datasets) -> dict[str, dict[str, torch.Tensor]]:
    world = World.single()
    device = choose_device(recipe.parallel, world)
    context = RunContext.derive(recipe, world, device, datasets, contextlib.ExitStack())
    precision = context.create_precision()
    model = context.create_model(precision, is_new=False)
    named = precision.optimized_parameters(model)
    optimizer = build_optimizer(recipe.optim, named, device.type, layers_for_decay(recipe.optim, model))
    average = build_weight_average(recipe.train.ema, model, optimizer, named)
    for _, parameter in named:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # creates the optimizer's state
    tensors = {
        "model": model_tensors(model),
        "optimizer": optimizer_tensors(optimizer),
        "precision": precision.tensors(),
        "average": average.tensors() if average else {},
    }
    return {name: group for name, group in tensors.items() if group or name == "optimizer"}


def _ignore_warning(message: str) -> None:
    """Ignore a warning: failures are raised."""
