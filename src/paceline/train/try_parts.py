"""Make a user's own augmentation and optimizer, and try them on nothing, for whoever wants to know before a run.

Their networks are tried by `models.trial`, their data when they are loaded, and sinks, which may call a server, not.
"""

import torch
from torch import nn

from paceline.core.errors import RecipeError
from paceline.data.augment.own import try_changes
from paceline.models.zoo import build_model
from paceline.recipe.own import told
from paceline.recipe.plan import Plan
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.optim import OwnOptim
from paceline.train.optim import build_optimizer, layers_of
from paceline.train.optimizers.counters import build_counters


def try_parts(recipe: Recipe, plan: Plan) -> None:
    """Raise `RecipeError` for an augmentation or optimizer of a user's own that cannot be made, or does not fit.

    Also for an optimizer that cannot make a step, or keeps what a checkpoint cannot hold.
    """
    try_changes(recipe.data.augment, plan.channels, plan.image_size)
    if isinstance(recipe.optim, OwnOptim):
        with torch.random.fork_rng(devices=[]):
            model = build_model(recipe.model, num_classes=plan.num_classes, channels=plan.channels)
            _try_optimizer(recipe.optim, model)


def _try_optimizer(section: OwnOptim, model: nn.Module) -> None:
    optimizer = build_optimizer(section, model.named_parameters(), "cpu", layers_of(section, model))
    counters = build_counters(section, optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    try:
        optimizer.step()
    except Exception as error:
        raise RecipeError(f"optim.name: {section.name} raised {told(error)} in its first step (mend it)") from error
    counters.values()
