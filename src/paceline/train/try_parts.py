"""Try a recipe's components without training: optimizer, loss, augmentation, initial weights.

`models.trial` tries the model. Sinks are not tried, since they may contact a server.
"""

import torch
from torch import nn

from paceline.core.dataset import Source
from paceline.core.errors import RecipeError
from paceline.data.augment.own import try_plugin_augments
from paceline.models.pretrained import find_weights_file
from paceline.models.trial import build_model_on_device
from paceline.recipe.own import describe_error
from paceline.recipe.plan import Plan
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.optim import Adam, OptimSection, OwnOptim, Sgd
from paceline.recipe.schema.own import is_own_model
from paceline.train.beginning import find_initial_checkpoint
from paceline.train.loss import build_loss
from paceline.train.optim import build_optimizer, describe_layer_decay, layers_for_decay
from paceline.train.optimizers.counters import build_extra_state


def try_components(recipe: Recipe, plan: Plan, train: Source) -> tuple[str, ...]:
    """Return notes on the optimizer, and on the loss over the split `train`.

    Raise `RecipeError` for missing initial weights, optimizer settings without effect on this model, class weights that
    do not fit, the user's own augmentation or optimizer that cannot be built or used, and an optimizer whose state
    cannot be saved.
    """
    try_plugin_augments(recipe.data.augment, plan.channels, plan.image_size)
    is_plugin = isinstance(recipe.optim, OwnOptim)
    # The user's own code may depend on values; for the others, meta tensors suffice.
    device = torch.device("cpu" if is_plugin or is_own_model(recipe.model.name) else "meta")
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
    counters = build_extra_state(section, optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    try:
        optimizer.step()
    except Exception as error:
        raise RecipeError(
            f"optim.name: {section.name} raised {describe_error(error)} in its first step (fix it)"
        ) from error
    counters.values()
