"""Try before a run: build its components, the user's own among them, and measure the time to save."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from paceline.core.dataset import Datasets, Source
from paceline.core.errors import RecipeError
from paceline.core.results import CheckpointResult
from paceline.core.world import World
from paceline.data.augment.plugin import try_plugin_augments
from paceline.measure.timer import StageTimer
from paceline.models.pretrained import find_weights_file
from paceline.models.published import NotCachedError, find_cached, find_published_weights
from paceline.models.validate import build_model_on_device
from paceline.parallel.device import choose_device
from paceline.parallel.strategy import SingleDevice
from paceline.recipe.plan import Plan
from paceline.recipe.plugins import CALLBACK, describe_error, plugins_of
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.base import is_plugin_name
from paceline.recipe.schema.model import Model, is_published
from paceline.recipe.schema.optim import Adam, OptimSection, OwnOptim, Sgd
from paceline.training.checkpoint import CheckpointStorage, CheckpointWriter, KeepPolicy, Snapshot
from paceline.training.components import build_training_state
from paceline.training.context import RunContext
from paceline.training.datasets import discard_message
from paceline.training.distill import check_teacher_run, teacher_errors, teacher_section
from paceline.training.init_weights import find_initial_checkpoint
from paceline.training.loss import build_loss
from paceline.training.optim.build import build_optimizer, describe_layer_decay, layers_for_decay
from paceline.training.optim.extra_state import ExtraOptimizerState
from paceline.training.state import TrainState
from paceline.training.unfreeze import build_unfreezing


def try_components(recipe: Recipe, plan: Plan, train: Source) -> tuple[str, ...]:
    """Build the components of `recipe` as a run would; return notes on the optimizer and the loss.

    Raise `RecipeError` for missing initial weights, settings without effect on this model, unknown classes, and a
    plugin that cannot be built, used or saved.
    """
    try_plugin_augments(recipe.data.augment, train.info.pixel_format, plan.image_size)
    is_plugin = isinstance(recipe.optim, OwnOptim)
    # The user's own code may depend on values; for the others, meta tensors suffice.
    device = torch.device("cpu" if is_plugin or is_plugin_name(recipe.model.name) else "meta")
    with torch.random.fork_rng(devices=[]):
        model = build_model_on_device(recipe.model, plan, device)
    notes = [_check_initial_weights(recipe.model)]
    if recipe.train.distill != "off":
        teacher = find_initial_checkpoint(recipe.train.distill.teacher, "train.distill.teacher")
        if teacher:
            check_teacher_run(recipe.train.distill, teacher, train.info)
        with teacher_errors(recipe.train.distill):
            note = _check_initial_weights(teacher_section(recipe.train.distill, recipe.model, teacher))
        notes.append(note.replace("model.weights", "train.distill.teacher"))
    unfreezing = build_unfreezing(recipe.model, plan, model)
    with unfreezing.all_trained(model):
        layers = layers_for_decay(recipe.optim, model)
        section, named = _without_kernels(recipe.optim), model.named_parameters()
        optimizer = build_optimizer(section, named, device.type, layers, unfreezing.names)
    if is_plugin:
        with torch.random.fork_rng(devices=[]):
            _try_optimizer_step(recipe.optim, optimizer, model)
    _, weights_note = build_loss(recipe.train, train, torch.device("cpu"))
    for plugin in plugins_of(recipe):
        if plugin.contract is CALLBACK:
            plugin.make()
    return tuple(filter(None, (*notes, describe_layer_decay(recipe.optim, optimizer, layers), weights_note)))


def _check_initial_weights(section: Model) -> str:
    """Return a note if the run downloads its initial weights, or "". Raise `RecipeError` if there are none."""
    if is_published(section.weights):
        try:
            published = find_published_weights(section, may_download=False)
        except NotCachedError:
            return f"model.weights: the run will download {section.weights}"
        return "" if find_cached(published) else f"model.weights: the run will download {published.name}"
    if section.weights != "off" and not find_initial_checkpoint(section.weights):
        find_weights_file(section.weights)
    return ""


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
    snapshot = _build_snapshot(recipe, datasets)
    stall, whole = StageTimer(), StageTimer()
    with temporary_folder(folder) as below:
        checkpoints = CheckpointStorage(below, KeepPolicy(num_newest=1))
        is_background = recipe.checkpoint.background == "on"
        # No warning is lost, as failures are raised.
        writer = CheckpointWriter(checkpoints, background=is_background, on_failure="stop", warn=discard_message)
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
def temporary_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder in `folder`. Raise `RecipeError` if it cannot be written."""
    try:
        below = tempfile.TemporaryDirectory(prefix=".paceline-", dir=folder)
    except OSError as error:
        raise RecipeError(f"{folder}: cannot be written to: {error.strerror} (go to a folder that can)") from None
    with below as name:
        yield Path(name)


def _build_snapshot(recipe: Recipe, datasets: Datasets) -> Snapshot:
    world = World.single()
    device = choose_device(recipe.parallel, world)
    context = RunContext.derive(recipe, world, device, datasets, contextlib.ExitStack())
    precision = context.create_precision()
    model = context.create_model(precision, is_new=False)
    context.add_adapters(model)
    unfreezing = build_unfreezing(recipe.model, context.plan, model)
    with unfreezing.all_trained(model):
        layers = layers_for_decay(recipe.optim, model)
        training_state = build_training_state(context, model, precision, SingleDevice(), layers, unfreezing.names)
    for group in training_state.optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    training_state.optimizer.step()  # creates the optimizer's state
    return training_state.state_dict(TrainState(), {})
