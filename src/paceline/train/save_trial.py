"""Measure the time to save a recipe's state on this machine, without training."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from paceline.core.dataset import Datasets
from paceline.core.errors import RecipeError
from paceline.core.results import CheckpointResult
from paceline.core.world import World
from paceline.measure.timing import StageTimer
from paceline.parallel.device import choose_device
from paceline.recipe.schema import Recipe
from paceline.train.average import build_weight_average
from paceline.train.checkpoint import (
    CheckpointStorage,
    FileCheckpointWriter,
    KeepPolicy,
    Snapshot,
    model_tensors,
    optimizer_tensors,
)
from paceline.train.optim import build_optimizer, layers_for_decay
from paceline.train.parts import RunContext


def measure_saving(recipe: Recipe, folder: Path, datasets: Datasets, times: int = 3) -> CheckpointResult:
    """Return the means over `times` saves of the state of `recipe`, on one rank, in a temporary folder below `folder`.

    `datasets` determine classes and channels. Nothing trains meanwhile, so background writes may take longer in a run.
    Raise `CheckpointError` if a checkpoint cannot be written, `RecipeError` if nothing can be.
    """
    snapshot = Snapshot(_state_tensors(recipe, datasets), {"train": {}})
    stall, whole = StageTimer(), StageTimer()
    with _temporary_folder(folder) as below:
        checkpoints = CheckpointStorage(below, KeepPolicy(num_newest=1))
        is_background = recipe.checkpoint.background == "on"
        writer = FileCheckpointWriter(checkpoints, background=is_background, on_failure="stop", warn=_ignore_warning)
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
    parts = RunContext.derive(recipe, world, device, datasets, contextlib.ExitStack())
    precision = parts.create_precision()
    model = parts.create_model(precision, is_new=False)
    named = list(precision.weights.named_parameters(model))
    optimizer = build_optimizer(recipe.optim, named, device.type, layers_for_decay(recipe.optim, model))
    average = build_weight_average(recipe.train.ema, model, optimizer, named)
    for _, parameter in named:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # creates the optimizer's state
    tensors = {
        "model": model_tensors(model),
        "optimizer": optimizer_tensors(optimizer),
        "precision": precision.weights.tensors(),
        "average": average.tensors(),
    }
    return {name: part for name, part in tensors.items() if part or name == "optimizer"}


def _ignore_warning(message: str) -> None:
    """Ignore a warning: failures are raised."""
