"""Try a recipe's components without training: optimizer, loss, augmentation, initial weights.

`models.trial` tries the model. Sinks are not tried, since they may contact a server.
"""

import torch
from torch import nn

from paceline.core.dataset import Source
from paceline.core.errors import RecipeError
from paceline.data.augment.own import try_changes
from paceline.models.pretrained import weights_file
from paceline.models.trial import build_on
from paceline.recipe.own import told
from paceline.recipe.plan import Plan
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.optim import Adam, OptimSection, OwnOptim, Sgd
from paceline.recipe.schema.own import is_own_model
from paceline.train.beginning import checkpoint_to_start_from
from paceline.train.loss import build_loss
from paceline.train.optim import build_optimizer, layers_of, layers_told
from paceline.train.optimizers.counters import build_counters


def try_parts(recipe: Recipe, plan: Plan, train: Source) -> tuple[str, ...]:
    """Return notes on the optimizer, and on the loss over the split `train`.

    Raise `RecipeError` for missing initial weights, optimizer settings without effect on this model, class weights that
    do not fit, the user's own augmentation or optimizer that cannot be built or used, and an optimizer whose state
    cannot be saved.
    """
    try_changes(recipe.data.augment, plan.channels, plan.image_size)
    is_plugin = isinstance(recipe.optim, OwnOptim)
    # The user's own code may depend on values; for the others, meta tensors suffice.
    device = torch.device("cpu" if is_plugin or is_own_model(recipe.model.name) else "meta")
    with torch.random.fork_rng(devices=[]):
        model = build_on(recipe.model, plan, device)
    checkpoint = checkpoint_to_start_from(recipe.model.weights)
    if recipe.model.weights != "off" and not checkpoint:
        weights_file(recipe.model.weights)
    layers = layers_of(recipe.optim, model)
    optimizer = build_optimizer(_of_shapes(recipe.optim), model.named_parameters(), device.type, layers)
    if is_plugin:
        with torch.random.fork_rng(devices=[]):
            _try_step(recipe.optim, optimizer, model)
    _, weights_note = build_loss(recipe.train, train, torch.device("cpu"))
    return tuple(filter(None, (layers_told(recipe.optim, optimizer, layers), weights_note)))


def _of_shapes(section: OptimSection) -> OptimSection:
    """Return `section` without fused or foreach kernels, which torch rejects for meta tensors."""
    if isinstance(section, Sgd | Adam):
        return section.model_copy(update={"implementation": "loop"})
    return section


def _try_step(section: OptimSection, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    counters = build_counters(section, optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    try:
        optimizer.step()
    except Exception as error:
        raise RecipeError(f"optim.name: {section.name} raised {told(error)} in its first step (fix it)") from error
    counters.values()
